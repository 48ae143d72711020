"""`memfit doctor` and `memfit init`."""

from __future__ import annotations

import json

import pytest

from memfit.ir.profile import CopyRates
from memfit.measure.bandwidth import host_copy_bandwidth


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.measure.bandwidth.host_copy_bandwidth", lambda *_: 12.3e9)
    rates = CopyRates(11.1e9, 10.2e9, 3e-6, drag=1.0)
    monkeypatch.setattr("memfit.runtime.swap.rates.swap_rates", lambda device: rates)


def test_doctor_shows_devices_versions_and_copies(memfit):
    result = memfit("doctor")
    assert result.exit_code == 0, result.stderr
    for word in ("cpu", "within host memory", "12.3", "python", "torch", "compilers"):
        assert word in result.stdout
    assert "plans on cpu   11.1 GB/s to the host, 10.2 GB/s back, 3.0 us to start" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("next: memfit fit encoder")


def test_doctor_says_when_copies_could_not_be_measured(memfit, monkeypatch):
    monkeypatch.setattr("memfit.runtime.swap.rates.swap_rates", lambda device: None)
    assert "plans on cpu   not measured: nothing can be moved" in memfit("doctor").stdout
    assert json.loads(memfit("doctor", "--json").stdout)["devices"][0]["copy_rates"] is None


def test_doctor_says_how_to_install_what_is_missing(memfit, monkeypatch):
    from memfit.cli import doctor

    monkeypatch.setattr(doctor, "_version", lambda package: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    result = memfit("doctor")
    assert "missing: timm, for targets timm:NAME: pip install 'memfit[zoo]'" in result.stdout
    assert "install gcc and g++" in result.stdout
    assert "missing: matplotlib, for report --plots" in result.stdout
    assert "5 missing" in result.stdout


def test_host_copies_are_measured():
    assert host_copy_bandwidth(size=2**20, repeats=3) > 1e6


def test_doctor_json(memfit):
    data = json.loads(memfit("doctor", "--json").stdout)
    assert data["schema_version"] == 1
    assert data["devices"][0]["device"] == "cpu"
    assert data["devices"][0]["capacity_bytes"] > 0
    assert data["devices"][0]["copy_rates"]["in_bytes_per_s"] == 10.2e9
    assert data["packages"]["torch"]


def test_init_writes_a_file_that_its_next_command_fits(memfit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = memfit("init")
    assert result.exit_code == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    assert last == "next: memfit fit workload.py:workload"
    fitted = memfit(*last.removeprefix("next: memfit ").split(), "--set", "width=8")
    assert fitted.exit_code == 0, fitted.stderr
    assert "the smallest budget a plan can hold is" in " ".join(fitted.stdout.split())
    again = memfit("init")
    assert again.exit_code == 2
    assert "exists already" in again.stderr and "hint: " in again.stderr


def test_init_json(memfit, tmp_path):
    path = tmp_path / "mine.py"
    data = json.loads(memfit("init", path, "--json").stdout)
    assert data["schema_version"] == 1
    assert data["target"] == f"{path}:workload"


def test_doctor_says_what_slows_every_matrix_product(memfit, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert "CUBLAS_WORKSPACE_CONFIG" not in memfit("doctor").stdout
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert "slow: CUBLAS_WORKSPACE_CONFIG is set" in memfit("doctor").stdout
    assert json.loads(memfit("doctor", "--json").stdout)["cublas_workspace_config"] == ":4096:8"
