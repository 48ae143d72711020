"""Steps recorded on an H200 where activations may be moved to the host, and nothing made again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from memfit.ir.profile import Profile
from memfit.planning import make_plan as planning
from memfit.planning.acts import Pick
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.placed import filled_up, holds, seconds
from memfit.planning.request import Choice, Request
from memfit.planning.simulate import Simulator, simulator_of
from memfit.planning.strategies import choose_swap

GOLDEN = Path(__file__).parent


def _simulator(name: str) -> Simulator:
    return simulator_of(Profile.load(GOLDEN / f"{name}.profile.json.gz"), 0, ("offload",))


@pytest.mark.parametrize("name", ["llama_1b_long_h200", "vit_b_16_h200"])
def test_filling_up_from_the_lean_end_recomputed_although_only_moving_was_allowed(
    name: str,
) -> None:
    simulator = _simulator(name)
    budget = simulator.peak_bytes([]) * 9 // 10
    lean = choose_swap(simulator, Request(budget, float("inf")))
    full = filled_up(simulator, lean, budget)
    assert holds(simulator, full, budget)
    assert seconds(simulator, full) <= seconds(simulator, lean)
    picks = [act for act in full.acts if isinstance(act, Pick)]
    assert picks and not any(simulator.recomputes(pick) for pick in picks)


def test_what_is_moved_whole_is_an_end_to_fill_up_from() -> None:
    """The encoder in 70 % of its step was refused: only where one may recompute was it tried."""
    simulator = _simulator("encoder_h200")
    budget = simulator.peak_bytes([]) * 7 // 10
    plan = make_plan(simulator.profile, Goal(budget_bytes=budget, techniques=("offload",)))
    assert plan.techniques == ("offload",)
    assert plan.predicted.reserved_bytes is not None
    assert plan.predicted.reserved_bytes <= budget


@pytest.mark.parametrize(("share", "host_mib"), [(0.8, 2997), (0.9, 1554)])
def test_plans_that_were_mended_took_more_host_memory_than_they_might(
    share: float, host_mib: int
) -> None:
    """The encoder was refused for its host budget, though it can be held within that."""
    simulator = _simulator("encoder_h200")
    goal = Goal(
        budget_bytes=int(share * simulator.peak_bytes([])),
        techniques=("offload",),
        host_bytes=host_mib * 2**20,
    )
    assert goal.host_bytes is not None
    assert 0 < make_plan(simulator.profile, goal).host_bytes <= goal.host_bytes


@pytest.mark.parametrize(("share", "trims"), [(0.99, False), (0.5, True)])
def test_pages_are_given_back_where_what_else_holds_is_far_slower(
    monkeypatch: pytest.MonkeyPatch, share: float, trims: bool
) -> None:
    """`share`: of the seconds that everything moved takes, what a plan takes that gives back."""
    simulator = _simulator("vit_b_16_h200")
    budget = simulator.peak_bytes([]) // 2
    slow = choose_swap(simulator, Request(budget, float("inf")))
    assert holds(simulator, slow, budget)
    slow_s = seconds(simulator, slow)

    def found(_: Simulator, __: Request, choice: Choice, ___: str) -> Choice:
        return replace(slow, trim=choice.trim)

    def taking(_: Simulator, choice: Choice) -> float:
        return slow_s * (share if choice.trim else 1.0)

    monkeypatch.setattr(planning, "well_placed", found)
    monkeypatch.setattr(planning, "seconds", taking)
    monkeypatch.setattr(planning, "holds", lambda *_: False)
    goal = Goal(budget_bytes=budget, techniques=("offload",))
    choice = planning._choose(simulator, goal, budget, float("inf"))
    assert choice is not None and choice.trim is trims
