"""Run the cells of a benchmark one after the other, and save after each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from memfit.bench.cell import CellSpec, had_no_eager
from memfit.bench.order import expected_s, most_valuable_first
from memfit.bench.process import RunCell
from memfit.bench.systems.catalogue import check_system
from memfit.bench.workloads import check_target
from memfit.errors import UsageError
from memfit.ir.bench import DIED, TIMED_OUT, BenchReport, Cell, WorkloadSpec

Save = Callable[[BenchReport, Cell], None]  # with what was added to the report


@dataclass(frozen=True)
class Settings:
    """What all cells share, and for how long each may run."""

    steps: int = 10
    timeout_s: float = 600.0
    cap_bytes: int | None = None
    retry: bool = False  # run again what died, and what had no room for its reference

    def stored(self) -> dict[str, str]:
        """What must be the same for cells of one file."""
        cap = "none" if self.cap_bytes is None else str(self.cap_bytes)
        return {"steps": str(self.steps), "cap_bytes": cap}


def plan_cells(
    workloads: Sequence[WorkloadSpec],
    systems: Sequence[str],
    settings: Settings,
    only: Iterable[str] = (),
    also: Mapping[str, Sequence[str]] | None = None,
) -> list[CellSpec]:
    """Every workload under every system, and under those that it has `also`, checked.

    `only` are patterns of "WORKLOAD | SYSTEM".
    """
    names = [check_system(system) for system in systems]
    more = {name: [check_system(s) for s in found] for name, found in (also or {}).items()}
    for target in dict.fromkeys(w.target for w in workloads):
        check_target(target)
    names_of: dict[str, WorkloadSpec] = {}
    for workload in workloads:
        if names_of.setdefault(workload.name, workload) != workload:
            raise UsageError(
                f"two workloads are called {workload.name!r}: {workload.target} and "
                f"{names_of[workload.name].target}",
                hint="give their files or functions different names",
            )
    patterns = list(only)
    cells = [
        CellSpec(workload, system, settings.steps, settings.cap_bytes)
        for workload in workloads
        for system in dict.fromkeys([*names, *more.get(workload.name, ())])
    ]
    chosen = [c for c in cells if not patterns or any(_matches(c, p) for p in patterns)]
    if not chosen:
        why = f"no cell is like {' or '.join(map(repr, patterns))}" if cells else "there are none"
        raise UsageError(
            f"nothing to run: {why}",
            hint="a cell is 'WORKLOAD | SYSTEM': --only 'encoder* | memfit*'; "
            "memfit bench --list shows them",
        )
    return chosen


def open_report(path: Path, machine: dict[str, str], settings: Settings) -> BenchReport:
    """The report in the file, if it is of this machine and these settings, or a new one."""
    if not path.exists():
        return BenchReport(machine, settings.stored())
    report = BenchReport.load(path)
    for what, there, here in (
        ("machine", report.machine, machine),
        ("settings", report.settings, settings.stored()),
    ):
        for name in sorted({*there, *here}):
            if there.get(name) != here.get(name):
                raise UsageError(
                    f"{str(path)!r} has results of other {what}: {name} was "
                    f"{there.get(name)!r} and is {here.get(name)!r}",
                    hint="write to another file with -o, or remove this one",
                )
    return report


def missing_cells(
    report: BenchReport, cells: Sequence[CellSpec], settings: Settings
) -> list[CellSpec]:
    """The cells that the report has not got; with `retry` also those that came to nothing.

    These are the ones that died, and those that had no room for the step to compare with.
    """
    wanted = []
    for spec in cells:
        known = next((w for w in report.workloads if w.name == spec.workload.name), None)
        if known is not None and known != spec.workload:
            raise UsageError(
                f"the file has another workload that is called {known.name!r} as well",
                hint="write to another file with -o",
            )
        cell = report.find(spec.workload.name, spec.system)
        if cell is None or (settings.retry and (cell.status in DIED or had_no_eager(spec, cell))):
            wanted.append(spec)
    return wanted


def run_cells(
    report: BenchReport,
    cells: Sequence[CellSpec],
    settings: Settings,
    save: Save,
    *,
    started: Callable[[CellSpec], None],
    run: RunCell,
    log: Path | None = None,
    end: float | None = None,
) -> tuple[BenchReport, list[CellSpec]]:
    """Run these cells; whatever becomes of one, it is saved and the next one begins.

    None runs past `end` on time.monotonic(): those that were not begun for it, or were cut off by
    it, are returned beside the report and not in it.
    """
    left: list[CellSpec] = []
    for spec in most_valuable_first(cells):
        started(spec)
        cell = run_one(report, spec, settings, run, log, end)
        if cell is None:
            left.append(spec)
            continue
        report = report.with_cell(spec.workload, cell)
        save(report, cell)
    return report, left


def run_one(
    report: BenchReport,
    spec: CellSpec,
    settings: Settings,
    run: RunCell,
    log: Path | None,
    end: float | None,
) -> Cell | None:
    """Run a cell; None where it would not have ended, or did not end, by `end`."""
    room_s = math.inf if end is None else end - time.monotonic()
    if expected_s(spec, report) > room_s:
        return None
    cell = run(spec, min(settings.timeout_s, room_s), log)
    return None if cell.status == TIMED_OUT and room_s < settings.timeout_s else cell


def in_order(report: BenchReport, cells: Sequence[CellSpec]) -> BenchReport:
    """The report with its cells in the order of the suite, others after them."""
    order = {(c.workload.name, c.system): i for i, c in enumerate(cells)}
    ranked = sorted(report.cells, key=lambda c: order.get((c.workload, c.system), len(order)))
    return replace(report, cells=tuple(ranked))


def _matches(cell: CellSpec, pattern: str) -> bool:
    name = f"{cell.workload.name} | {cell.system}"
    wanted = "|".join(part.strip() for part in pattern.split("|"))
    return fnmatchcase(name.replace(" | ", "|"), wanted) or fnmatchcase(cell.workload.name, wanted)
