"""Lean variants that never ran, where a ViT-B/16 recorded on an H200 recomputes blocks whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from memfit.ir.joint_graph import Variant
from memfit.ir.plan import PARTIAL, RECOMPUTE
from memfit.ir.profile import Measurements, Profile
from memfit.planning.lesson import untried
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.simulate import simulator_of

MIB = 2**20
TIGHT = Goal(budget_bytes=1988 * MIB)  # of live bytes: the profile has no allocator


@pytest.fixture(scope="module")
def profile() -> Profile:
    found = Profile.load(Path(__file__).parent / "vit_b_16_h200.profile.json.gz")
    return replace(found, allocator=None)


def _leanest(profile: Profile, graph: int) -> Variant:
    menu = simulator_of(profile, 0, TIGHT.techniques).menus[graph]
    return min((variant for variant, _ in menu[1:]), key=lambda v: v.held_bytes)


def test_blocks_recomputed_whole_are_tried_inside(profile: Profile) -> None:
    plan = make_plan(profile, TIGHT)
    whole = [s.name for s in plan.segments if s.decision == RECOMPUTE and s.variant is not None]
    assert whole
    lesson = untried(profile, plan, TIGHT)
    assert lesson is not None
    inside = {s.name for s in lesson.segments if s.decision == PARTIAL}
    assert inside.issuperset(whole)
    assert not lesson.trim
    before = {s.name: s.decision for s in plan.segments}
    for segment in lesson.segments:
        assert segment.name in whole or segment.decision == before[segment.name]


def test_what_they_show_makes_a_faster_plan(profile: Profile) -> None:
    """Fused, a block inside needs what one that runs again whole needs: 748 MiB."""
    plan = make_plan(profile, TIGHT)
    lesson = untried(profile, plan, TIGHT)
    assert lesson is not None
    known = list(profile.known or [Measurements()] * len(profile.graphs))
    numbers = {graph.key: i for i, graph in enumerate(profile.graphs)}
    for segment in lesson.segments:
        if segment.variant is None or lesson.variants[segment.variant].unplanned:
            continue
        number = numbers[lesson.variants[segment.variant].graph]
        lean = _leanest(profile, number)
        if lean.measured or any(v.saved == lean.saved for v in known[number].variants):
            continue
        ran = replace(
            lean,
            measured=True,
            seconds=1.05e-3,
            backward_peak_bytes=min(lean.backward_peak_bytes, 748 * MIB),
        )
        known[number] = replace(known[number], variants=(*known[number].variants, ran))
    learned = replace(profile, known=tuple(known))
    better = make_plan(learned, TIGHT)
    assert better.predicted.step_s < 0.95 * plan.predicted.step_s
    assert better.predicted.peak_bytes <= 1988 * MIB
    assert untried(learned, better, TIGHT) is None


def test_plans_without_whole_blocks_have_nothing_to_learn(profile: Profile) -> None:
    goal = Goal(budget_bytes=7023 * MIB)
    assert untried(profile, make_plan(profile, goal), goal) is None


def test_single_operators_are_reckoned_right(profile: Profile) -> None:
    plan = make_plan(profile, TIGHT)
    assert untried(replace(profile, executor="graph"), plan, TIGHT) is None
