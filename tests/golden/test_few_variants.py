"""Where each variant has to be compiled, a plan makes do with few if that is hardly slower."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from memfit.ir.codec import from_data
from memfit.ir.plan import PARTIAL, Plan
from memfit.ir.profile import Measurements, Profile
from memfit.planning import few_variants
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.segment.priced_menu import priced_variant

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


def learned(profile: Profile, plan: Plan, factor: float) -> Profile:
    """The profile after the plan's variants ran, each `factor` times as long as reckoned."""
    known = [Measurements(factor=factor) for _ in profile.graphs]
    for variant in plan.variants:
        number = next(i for i, g in enumerate(profile.graphs) if g.key == variant.graph)
        graph = profile.graphs[number]
        saved = tuple(sorted(graph.index[name] for name in variant.saved))
        if variant.unplanned or set(saved) == set(graph.unplanned):
            continue
        reckoned, seconds = priced_variant(graph, Measurements(), saved, (), None)
        seen = replace(reckoned, seconds=factor * seconds, measured=True)
        known[number] = replace(known[number], variants=(*known[number].variants, seen))
    return replace(profile, known=tuple(known))


def kept(plan: Plan) -> set[tuple[str, ...]]:
    return {plan.variants[v].saved for v in variants(plan) if v is not None}


def test_after_learning_a_plan_is_made_of_variants_that_ran(profile: Profile) -> None:
    """The plan that ran holds no more: it changes, but compiles nothing for a few microseconds."""
    assert profile.baseline is not None
    static = profile.graph.fixed_bytes
    fused = replace(profile, executor="inductor")
    budget = int(static + 0.5 * (profile.baseline.peak_bytes - static))
    ran = make_plan(fused, Goal(budget_bytes=budget))
    seen = learned(fused, ran, 1.4)
    less = Goal(budget_bytes=int(0.97 * budget))
    free = make_plan(seen, less)
    again = make_plan(seen, less, known=ran)
    assert not kept(free) <= kept(ran)
    assert kept(again) <= kept(ran)
    assert again.predicted.reserved_bytes <= less.budget_bytes
    assert again.predicted.step_s <= 1.01 * free.predicted.step_s


def test_a_plan_that_ran_and_holds_is_not_searched_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To search for one that the allocator places well took seconds after every lesson."""
    measured = Profile.load(PROFILE.with_name("gpt2_large_set_up.profile.json.gz"))
    goal = Goal(budget_bytes=16 * 10**9)
    ran = make_plan(measured, goal)
    seen = learned(measured, ran, 0.9)
    free = make_plan(seen, goal)

    def searches(*_: object) -> None:
        raise AssertionError("a search that changes nothing")

    monkeypatch.setattr("memfit.planning.make_plan.well_placed", searches)
    again = make_plan(seen, goal, known=ran)
    assert kept(again) == kept(ran)
    assert again.predicted.reserved_bytes <= goal.budget_bytes
    assert again.predicted.step_s <= 1.01 * free.predicted.step_s
    assert again.predicted.lower_bound_s == free.predicted.lower_bound_s
