"""Where each variant has to be compiled, a plan makes do with few if that is hardly slower."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from memfit.ir.codec import from_data
from memfit.ir.plan import PARTIAL, Plan
from memfit.ir.profile import Profile
from memfit.planning import few_variants
from memfit.planning.make_plan import Goal, make_plan

PROFILE = Path(__file__).parent / "gpt2_large.profile.json.gz"


@pytest.fixture(scope="module")
def profile() -> Profile:
    return from_data(Profile, json.loads(gzip.decompress(PROFILE.read_bytes())))


def variants(plan: Plan) -> set[int | None]:
    return {segment.variant for segment in plan.segments if segment.decision == PARTIAL}


def test_few_variants_hold_the_budget_where_they_are_worth_it(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert profile.baseline is not None
    static = profile.graph.fixed_bytes
    goal = Goal(budget_bytes=int(static + 0.6 * (profile.baseline.peak_bytes - static)))
    free = make_plan(profile, goal)
    assert len(variants(free)) > 1
    fused = replace(profile, executor="inductor")
    monkeypatch.setattr(few_variants, "WORTH", 0.0)
    same = make_plan(fused, goal)
    assert same.predicted.step_s == free.predicted.step_s
    monkeypatch.setattr(few_variants, "WORTH", 0.05)
    few = make_plan(fused, goal)
    assert len(variants(few)) == 1
    assert few.predicted.peak_bytes <= goal.budget_bytes
    assert free.predicted.step_s <= few.predicted.step_s <= 1.05 * free.predicted.step_s
    assert few.predicted.lower_bound_s <= free.predicted.step_s
