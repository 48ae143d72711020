"""The table of techniques: taken ones in order with bytes and seconds, all of them when asked."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from memfit.ir.plan import Plan, TechniqueChoice
from memfit.report.techniques import technique_rows, technique_tables

MIB = 2**20
CHOICES = (
    TechniqueChoice("tiled_loss", True, "a plan holds the budget now", 8 * MIB, -0.001),
    TechniqueChoice("optimizer_offload", False, "the planned step takes 2x", -MIB, 0.2),
    TechniqueChoice("microbatch", False, "not possible: a batch of one cannot be split"),
)


def text(plan: Plan, *, explain: bool) -> str:
    console = Console(width=140, highlight=False)
    with console.capture() as captured:
        console.print(*technique_tables(plan, explain=explain))
    return captured.get()


def test_savings_and_costs_add_up_to_the_plan(plan: Plan) -> None:
    chosen = replace(plan, choices=CHOICES)
    taken = [row for row in technique_rows(chosen) if row.taken]
    assert [row.name for row in taken] == ["tiled_loss", "recompute"]
    saved = sum(row.saved_bytes or 0 for row in taken)
    assert plan.baseline_peak_bytes - saved == plan.predicted.peak_bytes
    cost_s = sum(row.cost_s or 0 for row in taken)
    assert abs(plan.baseline_step_s + cost_s - plan.predicted.step_s) < 1e-12


def test_taken_ones_are_shown_and_all_with_their_reasons_when_asked(plan: Plan) -> None:
    chosen = replace(plan, choices=CHOICES)
    brief, whole = text(chosen, explain=False), text(chosen, explain=True)
    assert "tiled_loss" in brief and "optimizer_offload" not in brief and "why" not in brief
    assert "-1.0 ms" in brief and "8.00 MiB" in brief
    assert all(choice.name in whole and choice.why in whole for choice in CHOICES)
    assert "-1.00 MiB" in whole


def test_a_plan_of_activations_alone_says_so_only_when_asked(plan: Plan) -> None:
    assert not technique_tables(plan, explain=False)
    assert "recompute" in text(plan, explain=True)
    kept = replace(plan, segments=plan.segments[:1])
    assert "everything fits without it" in text(kept, explain=True)
