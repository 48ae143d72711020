"""Ways to run the whole step, tried one after the other until one holds the budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memfit.errors import InfeasibleError
from memfit.holding import Held, hold_budget
from memfit.ir.plan import Plan
from memfit.ir.profile import Profile
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime.split import part_of
from memfit.whole_step import Measure, Whole, beside, whole_step
from memfit.workload import Workload

MOST_WAYS = 4  # that are run with the same techniques allowed


def hold_whole_step(
    workload: Workload,
    base: Profile,
    goal: Goal,
    plan: Plan | None,
    measure: Measure,
    say: Callable[[str], None],
) -> tuple[Whole, Held]:
    """Hold the goal's budget: as it is asked for, or by techniques that did not seem needed.

    A plan that took more than was thought is followed by one for so much less, which may need a
    technique that the first did not; the goal's last resort comes last.
    """
    ways: list[tuple[Any, ...]] = []  # that ran, or were to run
    refused: list[InfeasibleError] = []
    while True:
        missed = refused[-1].missed_bytes if refused else None
        asked = goal if missed is None else replace(goal, margin_bytes=missed)
        try:
            whole = whole_step(workload, base, asked, plan, measure)
            what = None if whole.setup is None else whole.setup.what
            way = what, whole.split, goal.techniques
            if way in ways:
                raise refused[-1]
            if ways:
                how = [*whole.techniques, *([f"{whole.split} parts"] if whole.split > 1 else [])]
                say(f"planning for less: {', '.join(how or goal.techniques)}")
            ways.append(way)
            part = part_of(workload, whole.split)
            return whole, hold_budget(part, whole.profile, goal, plan, whole.setup, say)
        except InfeasibleError as refusal:
            again = refusal.missed_bytes is not None and refusal not in refused
            alike = sum(allowed == goal.techniques for _, _, allowed in ways)
            again = again and alike < MOST_WAYS and _can_do_more(whole)
            refused.append(refusal)
            if again:
                continue
            if plan is not None or not last_resort_may_help(base, goal):
                ran = next((r.ran for r in refused if r.ran), "")
                if refusal.ran or not ran:
                    raise
                raise refusal.saying(f". What ran before did not hold: {ran}") from refusal
            goal = goal.at_last()


def _can_do_more(whole: Whole) -> bool:
    """Whether there is a technique that was not taken, or one that saved less than it can."""
    keeps = whole.setup is not None and whole.setup.state_kept_bytes > 0
    return keeps or any(not choice.taken for choice in whole.choices)


def plan_whole_step(workload: Workload, base: Profile, goal: Goal, measure: Measure) -> Plan:
    """The plan of the goal, or of its last resort where there is none; nothing is run under it."""
    while True:
        try:
            whole = whole_step(workload, base, goal, None, measure)
            return beside(base, make_plan(whole.profile, goal), whole.choices)
        except InfeasibleError:
            if not last_resort_may_help(base, goal):
                raise
            goal = goal.at_last()


def last_resort_may_help(base: Profile, goal: Goal) -> bool:
    """Whether there is a last resort, and room for what it leaves in place."""
    if not goal.last_resort or goal.budget_bytes is None:
        return False
    moved = "optimizer_offload" in goal.last_resort
    away = base.graph.static.get("optimizer_state", 0) if moved else 0
    return base.graph.static_bytes - away < goal.budget_bytes
