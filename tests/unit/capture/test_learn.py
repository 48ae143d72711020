"""Running a plan once teaches what its variants hold, need and cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

import memfit
from memfit.capture.learn import LARGEST_FACTOR, SMALLEST_FACTOR, learn_variants, weighed
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.simulate import Simulator
from memfit.targets import resolve_target

SMALL = {"n_layer": "6", "n_embd": "32", "n_head": "2", "vocab_size": "100"}


@pytest.fixture(scope="module")
def workload() -> memfit.Workload:
    return resolve_target("transformers:gpt2", batch=2, seq=64, overrides=SMALL)


def test_a_sure_measurement_is_believed_and_an_unsure_one_is_not() -> None:
    assert weighed(1.0, 2.0, 0.0) == pytest.approx(2.0)
    assert weighed(1.0, 2.0, 100.0) == pytest.approx(1.0, abs=0.01)
    assert weighed(1.0, 2.0, 0.5) == pytest.approx(1.5)
    assert weighed(1.0, -3.0, 0.0) == SMALLEST_FACTOR
    assert weighed(1.0, 50.0, 0.0) == LARGEST_FACTOR
    assert weighed(0.0, 1.0, 0.0) == 1.0


def test_what_ran_is_what_was_reckoned_from_the_graph(workload: memfit.Workload) -> None:
    profile = memfit.profile(workload, executor="graph")
    simulator = Simulator(profile, techniques=("recompute",))
    static, peak = profile.graph.fixed_bytes, simulator.peak_bytes([])
    plan = make_plan(profile, Goal(budget_bytes=int(static + 0.5 * (peak - static))))
    told: list[str] = []
    learned = learn_variants(workload, profile, plan, say=told.append)
    assert learned is not None
    works = [text.split()[0] for text in told]
    assert works == ["putting", "compiling", "recording", "timing", "putting"]
    reckoned = {v.saved: v for menu in simulator.menus for v, _ in menu}
    seen = [v for known in learned.known for v in known.variants]
    assert seen and all(v.measured for v in seen)
    for variant in seen:
        expected = reckoned[variant.saved]
        # States of random generators and counters are the only memory that no graph shows.
        assert abs(variant.held_bytes - expected.held_bytes) < 0.03 * peak
        assert abs(variant.forward_peak_bytes - expected.forward_peak_bytes) < 0.03 * peak
        assert abs(variant.backward_peak_bytes - expected.backward_peak_bytes) < 0.03 * peak
    # All it chose is known now.
    assert learn_variants(workload, learned, plan) is None


def test_new_variants_that_take_next_to_no_time_are_not_timed(
    workload: memfit.Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once others were: then their memory is all there is to learn."""
    profile = memfit.profile(workload, executor="graph")
    assert profile.baseline is not None
    budget = int(0.8 * profile.baseline.peak_bytes)
    plan = make_plan(profile, Goal(budget_bytes=budget))
    said: list[str] = []
    first = learn_variants(workload, profile, plan, say=said.append)
    assert first is not None and "timing what was chosen" in said
    monkeypatch.setattr("memfit.capture.learn.MARGINAL", 1e9)
    for known, timed in ((profile, True), (replace(profile, known=first.known), False)):
        forgotten = tuple(replace(m, variants=()) for m in known.known)
        said.clear()
        again = learn_variants(workload, replace(known, known=forgotten), plan, say=said.append)
        assert ("timing what was chosen" in said) == timed
    assert again is not None
    assert [m.factor for m in again.known] == [m.factor for m in first.known], "as they were"
    assert all(v.measured for m in again.known for v in m.variants)


def test_a_plan_that_keeps_everything_teaches_nothing(workload: memfit.Workload) -> None:
    profile = memfit.profile(workload, executor="graph")
    assert learn_variants(workload, profile, make_plan(profile, Goal(strategy="none"))) is None


def test_a_plan_that_ran_is_taken_again_where_it_is_about_as_good(
    workload: memfit.Workload,
) -> None:
    profile = memfit.profile(workload, executor="graph")
    peak = Simulator(profile).peak_bytes([])
    static = profile.graph.fixed_bytes
    goal = Goal(budget_bytes=int(static + 0.5 * (peak - static)))
    plan = make_plan(profile, goal)
    learned = learn_variants(workload, profile, plan)
    assert learned is not None
    again = make_plan(learned, goal, known=plan)
    free = make_plan(learned, goal)
    assert again.predicted.step_s <= free.predicted.step_s * 1.011
    assert again.predicted.reserved_bytes <= (goal.budget_bytes or 0)
    # A plan for less memory than is there now does not stand in the way of a faster one.
    roomy = make_plan(profile, Goal(budget_bytes=peak), known=plan)
    assert roomy.predicted.step_s == profile.step_s


def test_storages_of_both_passes_have_numbers_of_their_own(workload: memfit.Workload) -> None:
    """A gradient that had the number of a kept tensor was taken for it when placing memory."""
    profile = memfit.profile(workload, executor="graph")
    peak, static = Simulator(profile).peak_bytes([]), profile.graph.fixed_bytes
    plan = make_plan(profile, Goal(budget_bytes=int(static + 0.5 * (peak - static))))
    learned = learn_variants(workload, profile, plan)
    assert learned is not None
    for known in learned.known:
        for variant in known.variants:
            made = [s.storage for s in variant.forward if s.storage >= 0]
            later = [s.storage for s in variant.backward if s.storage >= 0 and s.birth >= 0]
            assert len(set(made)) == len(made) and len(set(later)) == len(later)
            assert not set(made) & set(later)
