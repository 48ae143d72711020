"""Cells made by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memfit.bench.workloads import named
from memfit.ir.bench import OK, BenchReport, Cell, Planned, Reference, WorkloadSpec

MIB = 2**20


def make_cell(
    system: str,
    peak_mb: float | None = None,
    ratio: float | None = None,
    *,
    workload: str = "net@8",
    noise: float = 0.01,
    kind: str = "eager",
    status: str = OK,
    **more: Any,
) -> Cell:
    """A cell with this peak and this time over a reference of 100 MB and 10 ms."""
    if status != OK:
        return Cell(workload, system, status, **more)
    reference = None
    if ratio is not None:
        again = 0.010 * (1 + noise)
        reference = Reference(kind, 100 * MIB, 110 * MIB, 0, 0.010, 0.0, again)
    return Cell(
        workload,
        system,
        OK,
        reference=reference,
        peak_bytes=None if peak_mb is None else int(peak_mb * MIB),
        step_s=None if ratio is None else 0.010 * ratio,
        samples=10,
        **more,
    )


def make_planned(*, numbers_agree: bool = True, **more: Any) -> Planned:
    """A plan that was to take 60 of 100 MB and 12 of 10 ms, and took 61 MB and 12.5 ms."""
    values: dict[str, Any] = {
        "budget_bytes": 64 * MIB,
        "predicted_peak_bytes": 60 * MIB,
        "measured_peak_bytes": 61 * MIB,
        "predicted_reserved_bytes": 62 * MIB,
        "measured_reserved_bytes": 62 * MIB,
        "unplanned_peak_bytes": 100 * MIB,
        "static_bytes": 30 * MIB,
        "predicted_step_s": 0.012,
        "predicted_ratio": 1.2,
        "measured_ratio": 1.25,
        "unplanned_step_s": 0.010,
        "gap": 0.0,
        "executor": "graph",
        "techniques": ("recompute",),
        "segments": 6,
        "chosen": ("layers.0", "layers.1"),
        "numbers_agree": numbers_agree,
        "bitwise": numbers_agree,
        "numbers_note": None,
        "fit_s": 3.0,
    }
    return Planned(**values | more)


def make_report(*cells: Cell, specs: tuple[WorkloadSpec, ...] = ()) -> BenchReport:
    """A report of these cells."""
    names = dict.fromkeys(c.workload for c in cells)
    found = specs or tuple(WorkloadSpec(name, "encoder") for name in names)
    machine = {"device": "cpu", "name": "a machine", "torch": "2.13.0"}
    return BenchReport(machine, {"steps": "10", "cap_bytes": "none"}, (), found, cells)


@pytest.fixture
def cell() -> Callable[..., Cell]:
    return make_cell


@pytest.fixture
def planned() -> Callable[..., Planned]:
    return make_planned


@pytest.fixture
def report() -> Callable[..., BenchReport]:
    return make_report


@pytest.fixture
def file_target(tmp_path: Path):
    """A workload whose loss does what it is told."""

    def make(does: str, model: str = "torch.nn.Linear(4, 1)") -> WorkloadSpec:
        path = tmp_path / "mine.py"
        path.write_text(
            "import os, signal, time\nimport torch\nimport memfit\n"
            "def loss_fn(model, batch):\n"
            f"    {does}\n"
            "    return model(batch).mean()\n"
            "def workload():\n"
            f"    model = {model}\n"
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
            "    return memfit.Workload(model, loss_fn, optimizer, torch.ones(2, 4))\n"
        )
        return named(WorkloadSpec("", f"{path}:workload"))

    return make
