"""Plan and run until the budget holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from memfit.capture.learn import learn_variants
from memfit.errors import InfeasibleError
from memfit.ir.plan import Plan
from memfit.ir.profile import Profile
from memfit.planning.lesson import untried
from memfit.planning.make_plan import Goal, make_plan, page_bytes
from memfit.runtime.apply import Applied
from memfit.runtime.setup import Setup
from memfit.units import format_bytes
from memfit.verify.budget import BudgetCheck, check_budget, run_once
from memfit.workload import Workload

MAX_ROUNDS = 3
MAX_LESSONS = 3  # plans that are run to learn about their variants, in each round


@dataclass(frozen=True)
class Held:
    """A plan that held its budget, and the profile with all that its rounds showed.

    `max_slowdown` is the limit it was made for.
    """

    profile: Profile
    plan: Plan
    check: BudgetCheck
    rounds: int
    notes: tuple[str, ...]
    max_slowdown: float | None = None


def hold_budget(
    workload: Workload,
    profile: Profile,
    goal: Goal,
    given: Plan | None,
    setup: Setup | None,
    say: Callable[[str], None],
) -> Held:
    """Plan, or take the `given` plan, and run it: each round leaves free what the last one missed.

    The profile grows by what the chosen variants showed when they ran. A refusal has it, too; what
    ran counts in the smallest budget that it names.
    """
    notes: list[str] = []
    made: Plan | None = None
    needed: list[int] = []  # budgets that plans which ran would have held
    for number in range(1, MAX_ROUNDS + 1):
        try:
            if given is None:
                profile, made = _planned(workload, profile, goal, made, setup, say, number)
            else:
                made = given
        except InfeasibleError as refusal:
            refusal.learned = refusal.learned or profile
            if not notes:
                raise
            refusal.missed_bytes, refusal.ran = goal.margin_bytes, "; ".join(notes)
            # The minimum it names has in it by how much the last plan was wrong about itself.
            raise refusal.saying(f". What ran before did not hold: {refusal.ran}") from refusal
        say(f"running under the budget (round {number})")
        check = check_budget(
            workload,
            Applied(made, workload.model, setup),
            made.budget_bytes,
            accumulate=profile.accumulate,
        )
        if check.holds:
            return Held(profile, made, check, number, tuple(notes), goal.max_slowdown)
        assert made.budget_bytes is not None
        needed.append(made.budget_bytes + check.over_bytes + page_bytes(profile))
        notes.append(f"round {number}: {_missed(made, check)}")
        if given is not None:
            break
        # So much less than this plan was to take: else the plan might stay as it is.
        spare = max(made.budget_bytes - made.predicted.reserved_bytes, goal.margin_bytes)
        goal = replace(goal, margin_bytes=spare + check.over_bytes)
    assert made is not None
    missed = InfeasibleError(
        f"the planned step does not hold the budget on this machine: {'; '.join(notes)}",
        budget_bytes=made.budget_bytes,
        minimum_bytes=min(needed),
        hint=f"try --budget {min(needed)}",
    )
    missed.learned, missed.missed_bytes, missed.ran = profile, goal.margin_bytes, "; ".join(notes)
    raise missed


def _missed(plan: Plan, check: BudgetCheck) -> str:
    """What a plan took and was to take: how far live bytes are off, and how far their places."""
    assert plan.budget_bytes is not None
    ran = "out of memory"
    if check.peak is not None:
        ran = _held(check.peak.reserved_bytes, check.peak.bytes)
    return (
        f"{ran} under the budget of {format_bytes(plan.budget_bytes)}, "
        f"{format_bytes(check.over_bytes)} too much, "
        f"predicted {_held(plan.predicted.reserved_bytes, plan.predicted.peak_bytes)}"
    )


def _held(reserved_bytes: int, live_bytes: int) -> str:
    live = "" if live_bytes == reserved_bytes else f" ({format_bytes(live_bytes)} live)"
    return f"{format_bytes(reserved_bytes)}{live}"


def _planned(
    workload: Workload,
    profile: Profile,
    goal: Goal,
    known: Plan | None,
    setup: Setup | None,
    say: Callable[[str], None],
    number: int,
) -> tuple[Profile, Plan]:
    """A plan made with what its variants showed when they ran, and the profile that has this.

    `known` is the plan of the round before.
    """
    say(f"planning (round {number})")
    made = make_plan(profile, goal, known)
    for _ in range(MAX_LESSONS):
        learned = learn_from(workload, profile, made, goal, setup, say)
        if learned is None:
            break
        profile = learned
        say(f"planning again (round {number})")
        try:
            made = make_plan(profile, goal, known=made)
        except InfeasibleError as refusal:
            refusal.learned = profile
            raise
    else:
        # Some of its variants may be new.
        run_once(workload, Applied(made, workload.model, setup))
    return profile, made


def learn_from(
    workload: Workload,
    profile: Profile,
    plan: Plan,
    goal: Goal,
    setup: Setup | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Profile | None:
    """The profile with what the plan's variants show or, when these are known, others that may
    serve better; None when there is nothing left to learn."""
    learned = learn_variants(workload, profile, plan, setup, say)
    if learned is not None:
        return learned
    lesson = untried(profile, plan, goal)
    return None if lesson is None else learn_variants(workload, profile, lesson, setup, say)
