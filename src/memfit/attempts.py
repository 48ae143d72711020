"""Ways to run the whole step, tried one after the other until one holds the budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from memfit.errors import InfeasibleError
from memfit.holding import Held, hold_budget
from memfit.ir.plan import Plan
from memfit.ir.profile import Profile
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime.split import part_of
from memfit.units import format_bytes
from memfit.whole_step import Measure, Whole, beside, whole_step
from memfit.workload import Workload

T = TypeVar("T")
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
    missed: list[InfeasibleError] = []  # of plans that ran
    goal = replace(goal, plain_step_s=base.step_s)

    def held_by(goal: Goal, whole: Whole) -> Held:
        try:
            part = part_of(workload, whole.split)
            return hold_budget(part, whole.profile, goal, plan, whole.setup, say)
        except InfeasibleError as refusal:
            if refusal.missed_bytes is not None:
                missed.append(refusal)
            raise

    def chosen(goal: Goal) -> Whole:
        spare = missed[-1].missed_bytes or 0 if missed else 0
        asked = replace(goal, margin_bytes=max(spare, goal.margin_bytes))
        return whole_step(workload, base, asked, plan, measure)

    def held(goal: Goal) -> tuple[Whole, Held]:
        whole = chosen(goal)
        for _ in range(MOST_WAYS):
            if missed:
                say(f"planning for less: {', '.join(_words(whole) or goal.techniques)}")
            try:
                return whole, held_by(goal, whole)
            except InfeasibleError as refusal:
                if refusal.missed_bytes is None or not _can_do_more(whole):
                    raise
                before, whole = whole, chosen(goal)
                if _same(before, whole):
                    raise
        raise missed[-1]

    try:
        return _or_at_last(base, goal, held)
    except InfeasibleError as refusal:
        if refusal.ran or not missed:
            raise
        raise refusal.saying(f". What ran before did not hold: {missed[0].ran}") from refusal


def plan_whole_step(workload: Workload, base: Profile, goal: Goal, measure: Measure) -> Plan:
    """The plan of the goal, or of its last resort where there is none; nothing is run under it."""
    goal = replace(goal, plain_step_s=base.step_s)

    def planned(goal: Goal) -> Plan:
        whole = whole_step(workload, base, goal, None, measure)
        return beside(base, make_plan(whole.profile, goal), whole.choices)

    return _or_at_last(base, goal, planned)


def _or_at_last(base: Profile, goal: Goal, make: Callable[[Goal], T]) -> T:
    """What is made of the goal, or of its last resort where nothing can be."""
    try:
        return make(goal)
    except InfeasibleError as refusal:
        if not goal.last_resort or goal.budget_bytes is None:
            raise
        stays = _stays_bytes(base, goal.last_resort)
        if stays >= goal.budget_bytes:
            raise refusal.saying(
                f". Not tried: {', '.join(goal.last_resort)}, which would leave "
                f"{format_bytes(stays)} in place; the smallest may be less with that"
            ) from refusal
    return make(goal.at_last())


def _stays_bytes(base: Profile, techniques: Sequence[str]) -> int:
    """Of what is there before the step, what these leave in place."""
    moved = "optimizer_offload" in techniques
    away = base.graph.static.get("optimizer_state", 0) if moved else 0
    return base.graph.static_bytes - away


def _can_do_more(whole: Whole) -> bool:
    """Whether there is a technique that was not taken, or one that saved less than it can."""
    keeps = whole.setup is not None and whole.setup.state_kept_bytes > 0
    return keeps or any(not choice.taken for choice in whole.choices)


def _same(one: Whole, other: Whole) -> bool:
    setups = [None if whole.setup is None else whole.setup.what for whole in (one, other)]
    return setups[0] == setups[1] and one.split == other.split


def _words(whole: Whole) -> list[str]:
    return [*whole.techniques, *([f"{whole.split} parts"] if whole.split > 1 else [])]
