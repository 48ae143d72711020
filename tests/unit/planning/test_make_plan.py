"""From a profile and a goal to a plan, or to a refusal that helps."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import InfeasibleError, UsageError
from memfit.ir.plan import KEEP, RECOMPUTE
from memfit.ir.profile import Baseline, Profile
from memfit.planning import optimal
from memfit.planning.budget import check_budget_text, resolve_budget
from memfit.planning.make_plan import Goal, make_plan, minimum_feasible
from memfit.planning.refusal import blocking_tensors
from memfit.planning.simulate import Simulator
from memfit.planning.techniques import (
    AVAILABLE,
    allowed_techniques,
    last_resort,
    techniques_for,
    without,
)

Chain = Callable[..., Profile]
Profiles = Callable[..., st.SearchStrategy[Profile]]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"strategy": "best"}, "unknown strategy 'best'"),
        ({"activation_reduction": 0.0}, "activation_reduction is 0.0"),
        ({"activation_reduction": 1.0}, "activation_reduction is 1.0"),
        ({"activation_reduction": 40}, "activation_reduction is 40"),
        ({"max_slowdown": 0.9}, "max_slowdown is 0.9"),
        ({"min_tensor_bytes": -1}, "min_tensor_bytes is -1"),
        ({"interval": 0}, "interval is 0"),
    ],
)
def test_wrong_goals_are_refused_with_a_hint(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as refusal:
        Goal(**wrong)
    assert refusal.value.hint
    assert refusal.value.exit_code == 2


def test_a_plan_says_what_it_decides_and_why(chain: Chain) -> None:
    profile = chain(6)
    calls = list(profile.graph.calls)
    calls[4] = replace(calls[4], leaf=True)
    calls[5] = replace(calls[5], pinned="changes its input in place")
    profile = replace(profile, graph=replace(profile.graph, calls=tuple(calls)))
    simulator = Simulator(profile)
    budget = int(0.8 * simulator.peak_bytes([]))
    plan = make_plan(profile, Goal(budget_bytes=budget))
    assert plan.budget_bytes == budget
    assert plan.predicted.peak_bytes == simulator.peak_bytes(plan.runs) <= budget
    assert plan.predicted.step_s == pytest.approx(simulator.step_seconds(plan.runs))
    assert profile.step_s <= plan.predicted.lower_bound_s <= plan.predicted.step_s
    assert 0 <= plan.predicted.gap < 0.01
    assert sum(plan.predicted.categories.values()) == plan.predicted.peak_bytes
    assert plan.static_bytes == profile.graph.fixed_bytes
    assert plan.baseline_peak_bytes == simulator.peak_bytes([])
    assert plan.techniques == ("recompute",)
    assert [s.name for s in plan.segments] == [f"layers.{i}" for i in range(6)]
    recomputed = {c for first, last in plan.runs for c in range(first, last + 1)}
    assert recomputed
    for index, segment in enumerate(plan.segments):
        assert segment.decision == (RECOMPUTE if index in recomputed else KEEP)
        assert (segment.run is not None) == (index in recomputed)
        assert segment.reason.startswith("frees" if index in recomputed else "kept")
    assert plan.segments[4].reason == "kept: a single layer"
    assert plan.segments[5].reason == "kept: changes its input in place"
    saved = plan.kept_bytes + plan.recomputed_bytes
    assert saved == 6 * 1000 + 5 * 100, "each block counts once"


def test_a_budget_with_room_needs_no_technique(chain: Chain) -> None:
    plan = make_plan(chain(4), Goal(budget_bytes=10**9))
    assert (plan.runs, plan.techniques) == ([], ())
    assert plan.predicted.step_s == plan.baseline_step_s


def test_nothing_is_searched_for_a_budget_below_what_is_there_before_the_step(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = chain(8)
    monkeypatch.setattr("memfit.planning.make_plan._fastest", lambda *_: pytest.fail("searched"))
    with pytest.raises(InfeasibleError) as refusal:
        make_plan(profile, Goal(budget_bytes=profile.graph.static_bytes - 1))
    assert refusal.value.minimum_bytes is not None
    assert refusal.value.minimum_bytes > profile.graph.static_bytes


def test_a_refusal_names_the_minimum_and_the_minimum_works(chain: Chain) -> None:
    profile = chain(10)
    minimum, runs = minimum_feasible(profile)
    with pytest.raises(InfeasibleError) as refusal:
        make_plan(profile, Goal(budget_bytes=minimum - 1))
    error = refusal.value
    assert error.minimum_bytes == minimum == Simulator(profile).peak_bytes(runs)
    assert error.exit_code == 1
    assert str(minimum) in str(error)
    assert "parameters" in str(error)
    assert error.hint is not None and str(round(minimum * 1.02)) in error.hint
    assert make_plan(profile, Goal(budget_bytes=minimum)).predicted.peak_bytes <= minimum


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_smallest_budget_of_a_random_step_works_and_less_is_refused(
    data: st.DataObject, random_profiles: Profiles
) -> None:
    profile = data.draw(random_profiles(6, accumulate=2))
    minimum, _ = minimum_feasible(profile)
    plan = make_plan(profile, Goal(budget_bytes=minimum))
    assert plan.predicted.peak_bytes <= minimum
    less = int(minimum * 0.998) - 1
    with pytest.raises(InfeasibleError) as refusal:
        make_plan(profile, Goal(budget_bytes=less))
    assert refusal.value.minimum_bytes == minimum


def test_a_margin_is_kept_free(chain: Chain) -> None:
    profile = chain(8)
    budget = int(0.8 * Simulator(profile).peak_bytes([]))
    plan = make_plan(profile, Goal(budget_bytes=budget, margin_bytes=1500))
    assert plan.budget_bytes == budget
    assert plan.predicted.peak_bytes <= budget - 1500
    minimum, _ = minimum_feasible(profile)
    assert plan.minimum_feasible_bytes == minimum + 1500


def test_a_strategy_that_does_not_reach_the_budget_points_to_optimal(chain: Chain) -> None:
    profile = chain(8)
    budget = int(0.9 * Simulator(profile).peak_bytes([]))
    with pytest.raises(InfeasibleError, match="strategy 'none' does not meet") as refusal:
        make_plan(profile, Goal(budget_bytes=budget, strategy="none"))
    assert refusal.value.hint is not None and "optimal" in refusal.value.hint
    assert make_plan(profile, Goal(budget_bytes=budget)).predicted.peak_bytes <= budget


@pytest.mark.parametrize("strategy", ["ratio", "interval", "all"])
def test_other_strategies_make_plans_too(chain: Chain, strategy: str) -> None:
    profile = chain(8)
    plan = make_plan(profile, Goal(strategy=strategy))
    assert plan.strategy == strategy
    assert plan.budget_bytes is None
    assert plan.runs
    assert plan.predicted.peak_bytes < plan.baseline_peak_bytes


def test_activation_reduction_is_a_share_of_what_is_not_fixed(chain: Chain) -> None:
    profile = chain(8)
    whole, fixed = Simulator(profile).peak_bytes([]), profile.graph.fixed_bytes
    plan = make_plan(profile, Goal(activation_reduction=0.4))
    assert plan.budget_bytes == whole - round(0.4 * (whole - fixed))
    assert plan.predicted.peak_bytes <= plan.budget_bytes
    tighter = make_plan(profile, Goal(activation_reduction=0.4, budget_bytes=plan.budget_bytes - 9))
    assert tighter.budget_bytes == plan.budget_bytes - 9


def test_max_slowdown_refuses_what_takes_longer(chain: Chain) -> None:
    profile = chain(8)  # a plain step takes 3.2 s, one more forward 0.8 s
    plan = make_plan(profile, Goal(activation_reduction=0.4, max_slowdown=1.25))
    slowdown = plan.predicted.step_s / profile.step_s
    assert 1 < slowdown <= 1.25
    with pytest.raises(InfeasibleError, match=r"allowed 1\.01x") as refusal:
        make_plan(profile, Goal(activation_reduction=0.4, max_slowdown=1.01))
    assert refusal.value.hint is not None
    hinted = re.search(r"--max-slowdown (\d\.\d\d),", refusal.value.hint)
    assert hinted is not None and 0 <= float(hinted[1]) - slowdown < 0.011


def test_a_slowdown_counts_from_the_plain_step(chain: Chain) -> None:
    """What a technique of the step itself takes is part of it: copies, or a second pass."""
    profile = chain(8)
    goal = Goal(activation_reduction=0.4, max_slowdown=1.25, plain_step_s=profile.step_s)
    assert make_plan(profile, goal).predicted.step_s <= 1.25 * profile.step_s
    slower = replace(profile, step_s=1.2 * profile.step_s)
    assert make_plan(slower, replace(goal, max_slowdown=1.5)).predicted.step_s <= 1.5 * 3.2
    for limit in (1.0, 1.25):
        with pytest.raises(InfeasibleError, match=r"costs 1\.\d+x the plain step's time"):
            make_plan(slower, replace(goal, max_slowdown=limit))


@pytest.mark.parametrize("seconds", [3.2, 3.3, 3.7, 4.1])
def test_the_slowdown_of_the_hint_is_enough(chain: Chain, seconds: float) -> None:
    """It was rounded to two digits, down in half of all cases, and then refused."""
    profile = replace(chain(8), step_s=seconds)
    with pytest.raises(InfeasibleError) as refusal:
        make_plan(profile, Goal(activation_reduction=0.4, max_slowdown=1.0))
    assert refusal.value.hint is not None
    hinted = re.search(r"--max-slowdown (\d\.\d\d),", refusal.value.hint)
    assert hinted is not None
    make_plan(profile, Goal(activation_reduction=0.4, max_slowdown=float(hinted[1])))


def test_blocking_tensors_name_bytes_makers_and_places(chain: Chain) -> None:
    profile = chain(3, inner=2048, output=1024, static=5120)
    blocks = [replace(b, origin="aten::mm") for b in profile.graph.blocks]
    profile = replace(profile, graph=replace(profile.graph, blocks=tuple(blocks)))
    simulator = Simulator(profile)
    lines = blocking_tensors(simulator, [])
    assert lines[:2] == ["9.00 KiB mm activations in layers.0 and 2 more", "5.00 KiB parameters"]
    assert len(blocking_tensors(simulator, [], most=2)) == 2


def test_the_peak_of_a_refusal_lists_replayed_blocks(chain: Chain) -> None:
    profile = chain(4, inner=10_000)
    with pytest.raises(InfeasibleError, match="At its peak"):
        make_plan(profile, Goal(budget_bytes=6000))


def test_an_interrupt_leaves_a_plan_that_says_so(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(optimal, "fastest", interrupted)
    profile = chain(8)
    budget = int(0.8 * Simulator(profile).peak_bytes([]))
    plan = make_plan(profile, Goal(budget_bytes=budget))
    assert plan.runs
    assert plan.predicted.peak_bytes <= budget
    assert any("interrupted" in note for note in plan.notes)


def test_budgets_in_words(chain: Chain) -> None:
    profile = chain(4, baseline=Baseline(20_000, 20_000, 1.0))
    assert resolve_budget("60%", profile) == 12_000
    assert resolve_budget("8kB", profile) == 8_000
    assert resolve_budget(123, profile) == 123
    free = profile.device.free_bytes
    assert resolve_budget(" Auto ", profile) == int(0.97 * free)
    simulated = replace(profile, baseline=None)
    assert resolve_budget("50%", simulated) == round(0.5 * Simulator(profile).peak_bytes([]))


@pytest.mark.parametrize("budget", ["0", 0, -5, "0%", "-3%", "x%", "nan%", "inf%", "12 Mib/s", ""])
def test_budgets_that_mean_nothing(chain: Chain, budget: str | int) -> None:
    with pytest.raises(UsageError) as refusal:
        check_budget_text(budget)
    assert refusal.value.hint
    with pytest.raises(UsageError):
        resolve_budget(budget, chain(2))


def test_a_budget_above_the_device_is_refused(chain: Chain) -> None:
    profile = chain(2)
    with pytest.raises(UsageError, match="more than the"):
        resolve_budget(profile.device.capacity_bytes + 1, profile)


def test_techniques() -> None:
    assert allowed_techniques(None) == AVAILABLE
    assert allowed_techniques("+offload", ("recompute",)) == ("recompute", "offload")
    assert allowed_techniques(["recompute"]) == ("recompute",)
    assert allowed_techniques([]) == ()
    with pytest.raises(UsageError, match="unknown technique 'magic'"):
        allowed_techniques("recompute,magic")
    assert techniques_for("optimal", None, "cuda") == ("recompute",)
    assert techniques_for("optimal", None, "cpu") == ("recompute",)
    assert techniques_for("optimal", "+offload", "cpu") == ("recompute", "offload")
    every = ("offload", "step_in_backward", "optimizer_offload")
    assert last_resort("optimal", None, "cuda") == every
    assert last_resort("optimal", "+offload, +tiled_loss", "cuda") == every[1:]
    assert last_resort("optimal", None, "cpu") == ("step_in_backward",)
    assert without(None, "microbatch") is None and without("+microbatch", "microbatch") is None
    assert without("microbatch", "microbatch") == []
    assert without("+offload, +microbatch", "microbatch") == ["+offload"]
    for strategy, allow in (("optimal", "recompute"), ("optimal", []), ("ratio", None)):
        assert last_resort(strategy, allow, "cuda") == ()
    assert techniques_for("swap", None, "cpu") == ("recompute", "offload")
    assert techniques_for("all", [], "cuda") == ()
    with pytest.raises(UsageError, match="strategy 'swap' is made of offload"):
        techniques_for("swap", "recompute", "cuda")
