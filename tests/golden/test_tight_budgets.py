"""GPT-2-large on an H200, its loss in tiles and stepped in backward, near its smallest budget.

The profile in gpt2_large_set_up.profile.json.gz was recorded on that GPU (8 x 1024 tokens, bf16).
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from memfit.ir.codec import from_data
from memfit.ir.profile import Profile
from memfit.planning.acts import Act, Pick, calls_of
from memfit.planning.fill_up import fill_up
from memfit.planning.make_plan import Goal, make_plan, simulator_of
from memfit.planning.placed import held_bytes
from memfit.planning.request import Request
from memfit.planning.simulate import Simulator
from memfit.planning.strategies import choose_interval

PROFILE = Path(__file__).parent / "gpt2_large_set_up.profile.json.gz"
MIB = 2**20
LIMIT_S = 25.0  # on a busy machine; planning alone takes about half of it here


@pytest.fixture(scope="module")
def profile() -> Profile:
    return from_data(Profile, json.loads(gzip.decompress(PROFILE.read_bytes())))


@pytest.mark.parametrize(("mib", "slowdown"), [(15259, 1.09), (11921, 1.2), (11400, 1.36)])
def test_what_the_allocator_holds_stays_under_a_tight_budget(
    profile: Profile, mib: int, slowdown: float
) -> None:
    begun = time.perf_counter()
    plan = make_plan(profile, Goal(budget_bytes=mib * MIB))
    assert time.perf_counter() - begun < LIMIT_S
    assert plan.predicted.peak_bytes <= plan.predicted.reserved_bytes <= mib * MIB
    assert plan.predicted.step_s < slowdown * plan.baseline_step_s
    assert not plan.trim


@pytest.fixture(scope="module")
def simulator(profile: Profile) -> Simulator:
    return simulator_of(profile, 0, ("recompute",))


@pytest.mark.parametrize("mib", [18000, 14800, 11921, 11100])
def test_filling_up_makes_a_plan_faster_and_asks_before_it_does(
    simulator: Simulator, mib: int
) -> None:
    lean = choose_interval(simulator, Request(mib * MIB, float("inf")))
    assert lean is not None
    asked: list[Sequence[Act]] = []

    def fits(acts: Sequence[Act]) -> bool:
        asked.append(acts)
        return held_bytes(simulator, acts) <= mib * MIB

    assert fits(lean.acts)
    acts = fill_up(simulator, lean.acts, fits, mib * MIB)
    assert acts in asked and held_bytes(simulator, acts) <= mib * MIB
    assert simulator.step_seconds(acts) < simulator.step_seconds(lean.acts)
    assert any(isinstance(act, Pick) for act in acts)
    calls = [call for act in acts for call in calls_of(act)]
    assert len(calls) == len(set(calls)), "a call is in one act"


def test_nothing_is_filled_up_where_nothing_fits(simulator: Simulator) -> None:
    lean = ((3, 4), (5, 8))
    assert fill_up(simulator, lean, lambda acts: False, 10**12) == lean
