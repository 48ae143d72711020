"""Who is best, and by how much."""

from __future__ import annotations

from memfit.bench.verdict import comparable, judge, pareto_front, summary_line, verdict_lines
from memfit.ir.bench import OUT_OF_MEMORY, REFUSED


def test_the_front_is_what_nothing_beats_in_both(cell):
    cells = [
        cell("eager", 100, 1.0),
        cell("slow", 100, 1.3),
        cell("middle", 60, 1.2),
        cell("worse", 70, 1.25),
        cell("small", 40, 1.8),
        cell("died", status=OUT_OF_MEMORY),
        cell("untimed", 10, None),
    ]
    assert [c.system for c in pareto_front(cells)] == ["small", "middle", "eager"]


def test_of_two_with_the_same_peak_the_faster_one_is_on_the_front(cell):
    cells = [cell("a", 50, 1.5), cell("b", 50, 1.4)]
    assert [c.system for c in pareto_front(cells)] == ["b"]


def test_only_cells_with_the_usual_reference_are_compared(cell):
    cells = [
        cell("a", 50, 1.5),
        cell("b", 50, 1.4),
        cell("c", 50, 1.1, kind="unplanned"),
    ]
    assert [c.system for c in comparable(cells)] == ["a", "b"]


def test_a_plan_is_faster_slower_equal_or_alone(cell):
    peers = [cell("eager", 100, 1.0), cell("compile", 80, 0.9), cell("checkpoint", 50, 1.5)]
    plans = [
        cell("memfit:85%", 85, 0.95),  # compile needs less and is faster
        cell("memfit:60%", 60, 1.2),  # faster than checkpoint
        cell("memfit:52%", 52, 1.505),  # within noise of checkpoint
        cell("memfit:40%", 40, 1.9),  # nothing else is so small
    ]
    verdict = judge("net@8", [*peers, *plans])
    outcomes = {d.planned.system: (d.outcome, d.rival and d.rival.system) for d in verdict.duels}
    assert outcomes == {
        "memfit:85%": ("slower", "compile"),
        "memfit:60%": ("faster", "checkpoint"),
        "memfit:52%": ("equal", "checkpoint"),
        "memfit:40%": ("alone", None),
    }
    lines = verdict_lines(verdict)
    assert lines[0] == (
        "net@8: memfit is faster at 1 of 4 points, equal within noise at 1, behind at 1, "
        "alone at 1 (no peer needs so little)"
    )
    assert "memfit:60%: 60 MB, 1.200x; 20.0% faster than checkpoint (50 MB, 1.500x)" in lines
    assert "memfit:85%: 85 MB, 0.950x; 5.6% slower than compile (80 MB, 0.900x)" in lines
    assert "memfit:40%: 40 MB, 1.900x; no peer needs so little" in lines
    assert "not beaten: compile (80 MB, 0.900x); within its memory memfit:60% is 33.3% slower" in (
        lines
    )
    assert "smallest peak: memfit:40% 40 MB, 20.0% below the peers' checkpoint 50 MB" in lines


def test_a_noisy_cell_makes_a_gain_count_as_none(cell):
    cells = [cell("checkpoint", 50, 1.5), cell("memfit:60%", 60, 1.4)]
    assert judge("net@8", cells).duels[0].outcome == "faster"
    cells = [cell("checkpoint", 50, 1.5, noise=0.2), cell("memfit:60%", 60, 1.4)]
    assert judge("net@8", cells).duels[0].outcome == "equal"


def test_a_plan_whose_numbers_differ_wins_nothing(cell, planned):
    wrong = cell("memfit:60%", 60, 0.5, planned=planned(numbers_agree=False))
    verdict = judge("net@8", [cell("checkpoint", 50, 1.5), wrong])
    assert verdict.duels == ()
    assert verdict_lines(verdict) == [
        "net@8: nothing to judge (memfit:60%: its numbers do not agree)"
    ]


def test_a_refused_budget_is_left_out_with_its_reason(cell):
    refused = cell("memfit:10%", status=REFUSED, reason="the minimum is 3.00 MiB")
    lines = verdict_lines(
        judge("net@8", [cell("eager", 100, 1.0), cell("memfit:60%", 60, 1.2), refused])
    )
    assert lines[-1] == "left out: memfit:10%: the minimum is 3.00 MiB"


def test_one_line_for_all_workloads_names_where_memfit_is_furthest_behind(cell):
    peer = cell("compile", 50, 1.0)
    fine = judge("a", [peer, cell("memfit:60%", 60, 0.9)])
    slow = judge("b", [peer, cell("memfit:60%", 60, 1.1), cell("memfit:70%", 70, 1.2)])
    assert summary_line([fine]) == "1 workload: memfit is faster at 1 of 1 points"
    assert summary_line([fine, slow]) == (
        "2 workloads: memfit is faster at 1 of 3 points, behind at 2; furthest behind: memfit:70% "
        "on net@8, 20.0% slower than compile"
    )
    assert summary_line([judge("c", [peer])]) is None


def test_points_that_nobody_contests_are_not_called_best(cell):
    """A plan that takes 1.571 of the only peer's time was "best at 1 of 1 points"."""
    verdict = judge("net@8", [cell("eager", 100, 1.0), cell("memfit-cut:40%", 60, 1.571)])
    assert verdict_lines(verdict)[0] == (
        "net@8: memfit is faster at 0 of 1 points, alone at 1 (no peer needs so little)"
    )


def test_without_a_peer_there_is_nothing_to_judge(cell):
    """A benchmark of memfit alone was one that it was best in, where no peer needs so little."""
    verdict = judge("net@8", [cell("memfit:60%", 60, 1.2)])
    assert verdict_lines(verdict) == ["net@8: nothing to judge (no peer to compare with)"]
    assert summary_line([verdict]) is None
