"""Run cells side by side: whenever one is being timed, the others stand still (measure/turns.py).

What ran out of memory, or died, may have had too little of the machine beside the others, and so
may the eager step that a cell is compared with: such a cell is run once more by itself. Times are
those of a quiet machine; seconds of whole cells are not.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from memfit.bench.cell import CellSpec, had_no_eager
from memfit.bench.order import most_valuable_first
from memfit.bench.process import RunCell
from memfit.bench.suite import Save, Settings, run_cells, run_one
from memfit.ir.bench import CRASHED, OUT_OF_MEMORY, TIMED_OUT, BenchReport
from memfit.measure.turns import kept_awake

SHORT = (OUT_OF_MEMORY, CRASHED, TIMED_OUT)  # of something that others may have had

OpenLane = Callable[[], AbstractContextManager[RunCell]]


def run_side_by_side(
    report: BenchReport,
    cells: Sequence[CellSpec],
    settings: Settings,
    save: Save,
    *,
    started: Callable[[CellSpec], None],
    open_lane: OpenLane,
    at_once: int,
    folder: Path,
    log: Path | None = None,
    end: float | None = None,
) -> tuple[BenchReport, list[CellSpec]]:
    """As `run_cells`, on so many lanes at once; the processes of all take turns in `folder`."""
    waiting = deque(most_valuable_first(cells))
    left: list[CellSpec] = []
    again: list[CellSpec] = []
    failures: list[BaseException] = []
    lock = threading.Lock()
    patient = replace(settings, timeout_s=at_once * settings.timeout_s)

    def work() -> None:
        nonlocal report
        try:
            with open_lane() as run:
                while waiting and not failures:
                    with lock:
                        if not waiting:
                            return
                        spec, known = waiting.popleft(), report
                        started(spec)
                    cell = run_one(known, spec, patient, run, log, end)
                    with lock:
                        if cell is None:
                            left.append(spec)
                            continue
                        if cell.status in SHORT or had_no_eager(spec, cell):
                            again.append(spec)
                        if cell.status not in SHORT:
                            report = report.with_cell(spec.workload, cell)
                            save(report, cell)
        except BaseException as error:
            failures.append(error)

    # Daemons: when this process is interrupted, their servers see it go and end what they run.
    workers = [threading.Thread(target=work, daemon=True) for _ in range(at_once)]
    with kept_awake(folder):
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if failures:
        raise failures[0]
    with open_lane() as run:
        report, more = run_cells(
            report, again, settings, save, started=started, run=run, log=log, end=end
        )
    there = {(cell.workload, cell.system) for cell in report.cells if cell.ok}
    missing = [spec for spec in more if (spec.workload.name, spec.system) not in there]
    return report, [*left, *missing]
