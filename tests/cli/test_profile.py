"""`memfit profile`: tables, and files whose numbers add up."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from memfit.ir.codec import from_data
from memfit.ir.profile import Profile
from memfit.planning.segment.tables import ACTIVATION_COLUMNS, NODE_COLUMNS


def test_profile_prints_segments_static_bytes_and_the_peak(memfit, tiny):
    result = memfit("profile", *tiny)
    assert result.exit_code == 0, result.stderr
    for word in ("layers.0 .. 1 (2)", "optimizer state", "peak of the step", "step time"):
        assert word in result.stdout
    assert "GB/s to the host, " in result.stdout and "nothing runs beside them" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("next: memfit plan encoder")


def test_profile_writes_its_files(memfit, tiny, tmp_path):
    folder = tmp_path / "new" / "profile"
    result = memfit("profile", *tiny, "-o", folder, "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["schema_version"] == 1
    profile = from_data(Profile, json.loads((folder / "profile.json").read_text()))
    assert profile.step_s == data["step_s"]
    assert profile.copy is not None
    assert profile.copy.out_bytes_per_s == data["copy"]["out_bytes_per_s"] > 0
    segments = list(csv.DictReader((folder / "segments.csv").open()))
    assert [row["name"] for row in segments] == [row["name"] for row in data["segments"]]
    timeline = list(csv.DictReader((folder / "timeline.csv").open()))
    peak = max(int(row["total_bytes"]) for row in timeline)
    assert peak == data["simulated_peak"]["peak_bytes"]
    for row in timeline:
        parts = [int(n) for name, n in row.items() if name.endswith("_bytes")]
        assert sum(parts) == 2 * int(row["total_bytes"])


def test_profile_has_the_peak_of_every_segment_call(memfit, tiny, tmp_path):
    """Per layer there were saved bytes and seconds, and no peak."""
    result = memfit("profile", *tiny, "-o", tmp_path, "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    segments = list(csv.DictReader((tmp_path / "segments.csv").open()))
    timeline = list(csv.DictReader((tmp_path / "timeline.csv").open()))
    for row in segments:
        peaks = [int(row[f"{phase}_peak_bytes"]) for phase in ("forward", "backward")]
        for phase, peak in zip(("forward", "backward"), peaks, strict=True):
            where = f"{phase} {row['name']}"
            assert peak >= max(int(p["total_bytes"]) for p in timeline if p["where"] == where) > 0
        assert max(peaks) <= data["simulated_peak"]["peak_bytes"]
    layers = [int(row["forward_peak_bytes"]) for row in segments if "layers" in row["name"]]
    assert layers == sorted(layers) and layers[0] < layers[-1]
    shown = memfit("profile", *tiny).stdout
    assert "saved each" in shown and "  peak" in shown


def test_profile_writes_operators_and_activations(memfit, tiny, tmp_path):
    result = memfit("profile", *tiny, "-o", tmp_path, "--executor", "module")
    assert result.exit_code == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    assert last.startswith("next: ") and last.endswith("--sweep --executor module")
    tables = {}
    for name, columns in (("nodes", NODE_COLUMNS), ("activations", ACTIVATION_COLUMNS)):
        data = json.loads((tmp_path / f"{name}.json").read_text(), parse_constant=pytest.fail)
        assert data["schema_version"] == 1
        table = list(csv.reader((tmp_path / f"{name}.csv").open()))
        assert table[0] == list(columns)
        assert table[1:] == [[str(value) for value in row.values()] for row in data[name]]
        tables[name] = data[name]
    nodes, activations = tables["nodes"], tables["activations"]
    assert [row["rank"] for row in nodes] == list(range(len(nodes)))
    assert nodes[-1]["node_name"] == "optimizer"
    layer = [row for row in activations if row["segment"] == "layers.0"]
    assert layer and all(row["first_bw_use_rank"] > row["last_fw_use_rank"] for row in layer)
    assert all(row["inactive_time_s"] > 0 for row in layer)


def test_profile_draws_its_rows_against_rank(memfit, tiny, tmp_path):
    """The CSV files had no plots beside them."""
    pytest.importorskip("matplotlib")
    result = memfit("profile", *tiny, "-o", tmp_path, "--plots")
    assert result.exit_code == 0, result.stderr
    names = ("run_time", "peak_memory", "activation_size", "inactive_time", "memory_by_rank")
    for name in names:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        drawn = ElementTree.parse(tmp_path / f"{name}.svg").getroot()
        text = "".join(drawn.itertext())
        assert "rank of the operator in the step" in text
    assert f"and {', '.join(names)} (.png and .svg) to" in " ".join(result.stdout.split())
    nodes = json.loads((tmp_path / "nodes.json").read_text())["nodes"]
    slowest = max(nodes, key=lambda row: row["median_run_time_s"])
    assert slowest["node_name"] in (tmp_path / "run_time.svg").read_text()


def test_profile_plots_without_a_folder_or_matplotlib_are_refused(memfit, tiny, monkeypatch):
    result = memfit("profile", *tiny, "--plots")
    assert result.exit_code == 2 and "hint: add -o DIR" in result.stderr
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = memfit("profile", *tiny, "--plots", "-o", "unused")
    assert result.exit_code == 2 and "memfit[plots]" in result.stderr
    assert not Path("unused").exists()


def test_the_next_command_measures_the_same_step(memfit, tiny):
    words = ["--segments", "layers.*", "--executor", "module", "--accumulate", "2"]
    last = memfit("profile", *tiny, *words).stdout.splitlines()[-1]
    assert last.endswith("--sweep --segments 'layers.*' --executor module --accumulate 2")


def test_profile_folder_that_is_a_file_is_refused(memfit, tiny, tmp_path):
    path = tmp_path / "taken"
    path.write_text("")
    result = memfit("profile", *tiny, "-o", path)
    assert result.exit_code == 2
    assert "cannot be made" in result.stderr
