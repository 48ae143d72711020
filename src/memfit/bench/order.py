"""Which cells are run first, and whether there is time for one more.

What a report is read for comes first: for every workload the eager step, torch.compile, blocks
checkpointed and memfit at each budget. All other systems follow, again workload by workload. Within
both, workloads and systems keep the order in which they were named.
"""

from __future__ import annotations

from collections.abc import Sequence

from memfit.bench.cell import CellSpec
from memfit.bench.systems.catalogue import split_name
from memfit.ir.bench import UNAVAILABLE, BenchReport

FIRST = ("eager", "compile", "checkpoint", "memfit", "memfit-cut")
UNKNOWN_CELL_S = 60.0  # what a cell is taken to need while none of its kind has run


def most_valuable_first(cells: Sequence[CellSpec]) -> list[CellSpec]:
    """The cells in the order in which they are run."""
    return sorted(cells, key=_is_rare)


def _is_rare(cell: CellSpec) -> bool:
    family, argument = split_name(cell.system)
    tuned = bool(argument) and not family.startswith("memfit")  # compile:0.5, checkpoint:half
    return family not in FIRST or tuned


def expected_s(cell: CellSpec, report: BenchReport) -> float:
    """Seconds that a cell will take: the longest of its kind so far.

    Its kind are cells of the same family (all budgets of memfit are one) and workload; else those
    of the family with other workloads.
    """
    family, _ = split_name(cell.system)
    alike = [c for c in report.cells if split_name(c.system)[0] == family]
    of_workload = [c.seconds for c in alike if c.workload == cell.workload.name]
    elsewhere = [c.seconds for c in alike if c.status != UNAVAILABLE]
    return max(of_workload or elsewhere, default=UNKNOWN_CELL_S)
