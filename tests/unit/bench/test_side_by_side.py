"""Cells side by side: all run, what was short of memory once more by itself, times in turns."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfit.bench.cell import NO_ROOM, CellSpec
from memfit.bench.process import cell_processes
from memfit.bench.side_by_side import run_side_by_side
from memfit.bench.suite import Settings, plan_cells
from memfit.ir.bench import OK, OUT_OF_MEMORY, BenchReport, Cell, WorkloadSpec

SETTINGS = Settings(steps=1, timeout_s=50.0)
WORKLOADS = [WorkloadSpec(f"encoder@{n}x32", "encoder", n, 32) for n in (2, 4)]
TINY = ("n_layer=1", "n_embd=16", "n_head=2", "n_ff=32", "vocab_size=50")


class Lanes:
    """Stand-ins for processes; `running` counts those at work."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running, self.most, self.lock = folder, 0, 0, threading.Lock()
        self.saved: list[str] = []
        self.given: list[float] = []

    @contextmanager
    def lane(self) -> Iterator[Any]:
        yield self.run

    def run(self, spec: CellSpec, timeout_s: float, log: Path | None) -> Cell:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.given.append(timeout_s)
        time.sleep(0.1)
        with self.lock:
            self.running -= 1
            crowded = spec.system == "checkpoint" and len(self.given) <= 4
        status = OUT_OF_MEMORY if crowded else OK
        return Cell(spec.workload.name, spec.system, status, seconds=1.0)

    def go(self, cells: list[CellSpec], **how: Any) -> tuple[BenchReport, list[CellSpec]]:
        return run_side_by_side(
            BenchReport({}, {}),
            cells,
            SETTINGS,
            lambda report, cell: self.saved.append(cell.key),
            started=lambda spec: None,
            open_lane=self.lane,
            at_once=2,
            folder=self.folder,
            **how,
        )


def test_all_cells_run_two_at_once_and_the_short_of_memory_again(tmp_path: Path) -> None:
    lanes = Lanes(tmp_path)
    cells = plan_cells(WORKLOADS, ["eager", "checkpoint"], SETTINGS)
    report, left = lanes.go(cells)
    assert not left and {c.status for c in report.cells} == {OK}
    assert sorted(c.key for c in report.cells) == sorted(lanes.saved) and len(lanes.saved) == 4
    assert lanes.most == 2
    # Side by side they may take twice as long, by themselves not.
    assert sorted(lanes.given) == [50.0] * (len(lanes.given) - 4) + [100.0] * 4
    assert len(lanes.given) > 4


def test_cells_whose_eager_step_had_no_room_run_again_unless_a_cap_says_so(tmp_path: Path) -> None:
    lanes = Lanes(tmp_path)

    def run(spec: CellSpec, timeout_s: float, log: Path | None) -> Cell:
        lanes.given.append(timeout_s)
        crowded = spec.cap_bytes is not None or timeout_s > SETTINGS.timeout_s
        notes = (f"{NO_ROOM} into it",) if crowded else ()
        return Cell(spec.workload.name, spec.system, OK, seconds=1.0, notes=notes)

    lanes.run = run  # type: ignore[method-assign]
    cells = plan_cells(WORKLOADS, ["compile"], SETTINGS)
    report, left = lanes.go(cells)
    assert lanes.given == [100.0, 100.0, 50.0, 50.0] and not left
    assert not any(cell.notes for cell in report.cells)
    lanes.given.clear()
    lanes.go([replace(cell, cap_bytes=2**30) for cell in cells])
    assert lanes.given == [100.0, 100.0]


def test_what_would_not_end_in_time_is_left(tmp_path: Path) -> None:
    cells = plan_cells(WORKLOADS, ["eager"], SETTINGS)
    report, left = Lanes(tmp_path).go(cells, end=time.monotonic() + 1)
    assert not report.cells and sorted(map(id, left)) == sorted(map(id, cells))


def test_a_failure_of_the_benchmark_itself_is_raised(tmp_path: Path) -> None:
    lanes = Lanes(tmp_path)
    lanes.run = lambda *_: json.loads("{")  # type: ignore[method-assign]
    with pytest.raises(json.JSONDecodeError):
        lanes.go(plan_cells(WORKLOADS, ["eager"], SETTINGS))


def test_cells_of_two_lanes_are_told_of_each_other(tmp_path: Path) -> None:
    """Both lanes' processes are in the folder, and their cells know of it."""
    folder = tmp_path / "turns"
    folder.mkdir()
    spec = WorkloadSpec("tiny", "encoder", 2, 8, fields=TINY)
    cell = CellSpec(spec, "eager", 1)
    with (
        cell_processes([cell], tmp_path, print, folder) as one,
        cell_processes([cell], tmp_path, print, folder) as other,
    ):
        found = [run(cell, 600.0, None) for run in (one, other)]
        assert [c.status for c in found] == [OK, OK]
        registered = [file.name for file in folder.iterdir() if file.name.isdigit()]
        assert len(registered) == 2
        assert (folder / "turn").exists(), "a cell took its turn"
    assert not [file for file in folder.iterdir() if file.name.isdigit()]
