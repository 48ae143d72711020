"""The order of cells, and what each is expected to take."""

from __future__ import annotations

from memfit.bench.cell import CellSpec
from memfit.bench.order import UNKNOWN_CELL_S, expected_s, most_valuable_first
from memfit.bench.systems.catalogue import PEERS
from memfit.bench.workloads import named
from memfit.ir.bench import OK, UNAVAILABLE, BenchReport, Cell, WorkloadSpec

ONE, TWO = (named(WorkloadSpec("", "encoder", batch, 32)) for batch in (4, 8))


def cells(*systems: str) -> list[CellSpec]:
    return [CellSpec(workload, system, 10) for workload in (ONE, TWO) for system in systems]


def test_what_a_report_is_read_for_comes_first_for_every_workload():
    ordered = most_valuable_first(cells(*PEERS, "memfit:80%", "memfit:60% allow=+offload"))
    first = ["eager", "compile", "checkpoint", "memfit:80%", "memfit:60% allow=+offload"]
    assert [(c.workload.batch, c.system) for c in ordered[:10]] == [
        *((4, system) for system in first),
        *((8, system) for system in first),
    ]
    rest = [system for system in PEERS if system not in first]
    assert [c.system for c in ordered[10:]] == [*rest, *rest]


def test_a_cell_takes_as_long_as_the_longest_of_its_kind():
    report = BenchReport({}, {})
    (ours, theirs, eager, _, other, _) = cells("memfit:40%", "compile", "eager")
    assert expected_s(ours, report) == UNKNOWN_CELL_S
    for system, seconds, status in (
        ("memfit:80%", 40.0, OK),
        ("memfit:60%", 20.0, OK),
        ("compile:0.5", 90.0, OK),
        ("eager", 1.0, UNAVAILABLE),
    ):
        report = report.with_cell(ONE, Cell(ONE.name, system, status, seconds=seconds))
    assert expected_s(ours, report) == 40.0
    assert expected_s(theirs, report) == expected_s(other, report) == 90.0
    # Where a system cannot run one workload, it says nothing of another.
    assert expected_s(eager, report) == 1.0
    assert expected_s(cells("eager")[1], report) == UNKNOWN_CELL_S
