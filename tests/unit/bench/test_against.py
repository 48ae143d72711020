"""Regressions are found as ratios."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.bench.against import change_lines, compare, machine_lines
from memfit.errors import UsageError
from memfit.ir.bench import OUT_OF_MEMORY, UNAVAILABLE


def changes_of(report, before, now, **options):
    return compare(report(*before), report(*now), [c.key for c in before], **options)


def test_a_slower_machine_is_no_regression(cell, report):
    before = cell("memfit:60%", 60, 1.2)
    slower = replace(
        before,
        step_s=before.step_s * 3,
        reference=replace(before.reference, step_s=0.030, again_s=0.0303),
    )
    assert [c.verdict for c in changes_of(report, [before], [slower])] == ["same"]


@pytest.mark.parametrize(
    ("ratio", "peak", "verdict", "said"),
    [
        (1.25, 60, "same", "1 as they were"),
        (1.32, 60, "worse", "time / reference 1.200 -> 1.320 (+10.0%, room 5.0%)"),
        (1.08, 60, "better", "time / reference 1.200 -> 1.080 (-10.0%, room 5.0%)"),
        (1.2, 63, "worse", "peak / reference 0.600 -> 0.630 (+5.0%, room 2.0%)"),
        (1.2, 50, "better", "peak / reference 0.600 -> 0.500"),
    ],
)
def test_ratios_that_move_beyond_the_tolerance(cell, report, ratio, peak, verdict, said):
    found = changes_of(report, [cell("memfit:60%", 60, 1.2)], [cell("memfit:60%", peak, ratio)])
    assert [c.verdict for c in found] == [verdict]
    assert said in "\n".join(change_lines(found))


def test_within_the_noise_of_either_run_nothing_is_worse(cell, report):
    before, now = cell("memfit:60%", 60, 1.2), cell("memfit:60%", 60, 1.32, noise=0.15)
    assert changes_of(report, [before], [now])[0].verdict == "same"
    assert changes_of(report, [now], [before])[0].verdict == "same"


def test_the_tolerance_can_be_set(cell, report):
    before, now = cell("memfit:60%", 60, 1.2), cell("memfit:60%", 60, 1.32)
    assert changes_of(report, [before], [now], tolerance=0.2)[0].verdict == "same"


def test_a_cell_that_dies_or_whose_numbers_differ_is_worse(cell, planned, report):
    fine = cell("memfit:60%", 60, 1.2, planned=planned())
    dead = cell("memfit:60%", status=OUT_OF_MEMORY, reason="no room")
    wrong = cell("memfit:60%", 60, 1.2, planned=planned(numbers_agree=False))
    assert changes_of(report, [fine], [dead])[0].worse == ("was ok, is out of memory (no room)",)
    assert changes_of(report, [dead], [fine])[0].verdict == "better"
    assert changes_of(report, [fine], [wrong])[0].worse == ("its numbers no longer agree",)


def test_a_system_that_is_no_longer_installed_is_worse_and_one_that_never_was_is_not(cell, report):
    gone = cell("torchao-offload", status=UNAVAILABLE, reason="torchao is not installed")
    assert changes_of(report, [cell("torchao-offload", 60, 1.2)], [gone])[0].verdict == "worse"
    assert changes_of(report, [gone], [gone])[0].verdict == "same"


def test_retries_are_worse_and_a_cell_not_run_is_said(cell, report):
    before = cell("memfit:60%", 60, 1.2)
    found = compare(
        report(before, cell("eager", 100, 1.0)),
        report(replace(before, retries=2)),
        [before.key, "net@8 | eager"],
    )
    assert [c.verdict for c in found] == ["worse", "not run"]
    assert "allocator retries 0 -> 2" in change_lines(found)[0]


def test_cells_that_one_of_both_runs_has_not_got_are_listed(cell, report):
    """Of those that the earlier run had not got nothing was said, and lost ones were "compared"."""
    eager, plan, other = (cell(name, 100, 1.0) for name in ("eager", "memfit:60%", "compile"))
    keys = [c.key for c in (eager, plan, other)]
    found = compare(report(eager, plan), report(eager, other), [*keys, "net@8 | blocks"])
    assert change_lines(found) == [
        "not run: net@8 | memfit:60%: in the earlier run only",
        "new: net@8 | compile: in this run only",
        "in neither: net@8 | blocks: in neither run yet",
        "1 cells compared, 1 as they were, 3 not compared",
    ]
    assert not any(change.worse for change in found)


def test_cells_beside_different_steps_are_not_compared(cell, report):
    eager = cell("memfit:60%", 60, 0.57)
    unplanned = replace(eager, reference=replace(eager.reference, kind="unplanned"))
    for now in (unplanned, replace(unplanned, step_s=0.5 * eager.step_s)):
        (found,) = changes_of(report, [eager], [now])
        assert (found.verdict, found.passes) == ("not comparable", False)
        said = change_lines([found])[0]
        assert said.endswith("was timed beside the eager step, is beside the unplanned one")
    retried = replace(eager, reference=replace(eager.reference, retries=3))
    assert changes_of(report, [eager], [retried])[0].verdict == "not comparable"


def test_a_ratio_that_there_was_none_of_is_not_worse(cell, report):
    now = cell("memfit:60%", 60, 1.2)
    before = replace(now, reference=None)
    assert changes_of(report, [before], [now])[0].verdict == "same"
    assert changes_of(report, [now], [before])[0].worse == (
        "time has no ratio any more",
        "peak has no ratio any more",
    )


def test_what_has_not_run_does_not_pass(cell, report):
    plan, other = cell("memfit:60%", 60, 1.2), cell("compile", 90, 0.8)
    found = compare(report(plan, other), report(plan), [plan.key, other.key])
    assert [c.passes for c in found] == [True, False]
    (new,) = compare(report(plan), report(plan, other), [plan.key, other.key])[1:]
    assert (new.verdict, new.passes) == ("new", True)


def test_other_settings_are_named(cell, report):
    one = report(cell("eager", 100, 1.0))
    other = replace(one, settings=one.settings | {"steps": "3"})
    assert len(machine_lines(one, other)) == 1 and "steps" in machine_lines(one, other)[0]


def test_nothing_in_common_is_an_error(cell, report):
    with pytest.raises(UsageError, match="none of these cells") as error:
        compare(report(cell("eager", 100, 1.0)), report(), ["other | eager"])
    assert "net@8 | eager" in str(error.value)
    with pytest.raises(UsageError, match="no cells at all"):
        compare(report(), report(), ["other | eager"])


def test_other_machines_are_named(cell, report):
    one, other = report(cell("eager", 100, 1.0)), report(cell("eager", 100, 1.0))
    other = replace(other, machine=other.machine | {"torch": "2.11.0"})
    assert machine_lines(one, one) == []
    assert machine_lines(one, other) == ["the earlier run had torch '2.13.0', this one '2.11.0'"]
