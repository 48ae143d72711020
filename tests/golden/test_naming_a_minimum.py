"""The smallest budget that a refusal names, once plans of a ViT-B/16 on an H200 are known.

Searches end after a time and try a few: the next one may not find what the last one did.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfit import holding
from memfit.errors import InfeasibleError
from memfit.ir.profile import Profile
from memfit.measure.memory import Peak
from memfit.planning import make_plan as making
from memfit.planning.make_plan import Goal, make_plan, minimum_feasible, page_bytes
from memfit.planning.request import Choice
from memfit.verify.budget import BudgetCheck

MIB = 2**20


@pytest.fixture(scope="module")
def profile() -> Profile:
    return Profile.load(Path(__file__).parent / "vit_b_16_h200.profile.json.gz")


@pytest.fixture(scope="module")
def goal(profile: Profile) -> Goal:
    return Goal(budget_bytes=int(1.05 * minimum_feasible(profile)[0]))


def _finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "_fastest", lambda *given: None)
    monkeypatch.setattr(making, "_smallest", lambda *given, **options: Choice(()))


def test_what_holds_is_not_refused_when_it_is_planned_again(
    profile: Profile, goal: Goal, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(profile, goal)
    _finds_nothing(monkeypatch)
    with pytest.raises(InfeasibleError):
        make_plan(profile, goal)
    again = make_plan(profile, goal, known=plan)
    assert goal.budget_bytes is not None
    assert again.predicted.reserved_bytes <= goal.budget_bytes
    tighter = replace(goal, budget_bytes=plan.predicted.reserved_bytes - 1)
    with pytest.raises(InfeasibleError) as refused:
        make_plan(profile, tighter, known=plan)
    named = plan.predicted.reserved_bytes + page_bytes(profile)
    assert refused.value.minimum_bytes == named


def _missing_by(
    over_bytes: int, profile: Profile, goal: Goal, monkeypatch: pytest.MonkeyPatch
) -> InfeasibleError:
    """The refusal of a fit each of whose plans takes so much more than the budget, and live bytes
    as predicted."""

    def check(workload: Any, applied: Any, budget: int, **options: Any) -> BudgetCheck:
        live = applied.predicted.peak_bytes
        return BudgetCheck(Peak(live, budget + over_bytes), over_bytes)

    def learn(workload: Any, profile: Profile, *rest: Any) -> Profile | None:
        return None if "learned" in profile.notes else replace(profile, notes=("learned",))

    monkeypatch.setattr(holding, "Applied", lambda plan, model, setup: plan)
    monkeypatch.setattr(holding, "check_budget", check)
    monkeypatch.setattr(holding, "learn_from", learn)

    class Nothing:
        model = None

    workload: Any = Nothing()
    with pytest.raises(InfeasibleError) as refused:
        holding.hold_budget(workload, profile, goal, None, None, lambda text: None)
    return refused.value


def test_a_budget_that_a_plan_would_have_held_is_the_most_that_is_named(
    profile: Profile, goal: Goal, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = making.make_plan

    def first_only(profile: Profile, goal: Goal, known: Any = None) -> Any:
        if goal.margin_bytes:
            _finds_nothing(monkeypatch)
        return real(profile, goal, known)

    monkeypatch.setattr(holding, "make_plan", first_only)
    refusal = _missing_by(300 * MIB, profile, goal, monkeypatch)
    assert goal.budget_bytes is not None and refusal.minimum_bytes is not None
    took = goal.budget_bytes + 300 * MIB
    assert goal.budget_bytes < refusal.minimum_bytes <= took + page_bytes(profile)
    assert "no plan fits" in refusal.message
    assert refusal.learned.notes == ("learned",)


def test_rounds_that_miss_name_more_than_the_budget_they_missed(
    profile: Profile, goal: Goal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They named the smallest budget of the plan that had just missed a larger one."""
    roomy = replace(goal, budget_bytes=4000 * MIB)
    refusal = _missing_by(30 * MIB, profile, roomy, monkeypatch)
    assert "does not hold the budget on this machine" in refusal.message
    assert refusal.minimum_bytes == 4030 * MIB + page_bytes(profile)
    assert str(refusal.minimum_bytes) in str(refusal.hint)
    assert refusal.learned.notes == ("learned",)
    # Whether live bytes are off, or only their places, tells what to look for.
    assert "round 1: 3.94 GiB (" in refusal.message and ", predicted 3." in refusal.message
    assert refusal.message.count(" live)") == 6
