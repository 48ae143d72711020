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

from memfit.errors import InfeasibleError
from memfit.ir.codec import from_data
from memfit.ir.profile import Profile
from memfit.planning import optimal, placed
from memfit.planning.acts import Act, Pick, calls_of
from memfit.planning.fill_up import fill_up
from memfit.planning.make_plan import Goal, make_plan, minimum_feasible, simulator_of
from memfit.planning.placed import held_bytes
from memfit.planning.request import Request
from memfit.planning.simulate import Simulator
from memfit.planning.strategies import choose_interval

PROFILE = Path(__file__).parent / "gpt2_large_set_up.profile.json.gz"
MIB = 2**20
LIMIT_S = 10.0
MAX_PLACEMENTS = 140  # 5 to 121 are needed


@pytest.fixture(scope="module")
def profile() -> Profile:
    return from_data(Profile, json.loads(gzip.decompress(PROFILE.read_bytes())))


def _no_solver(*args: object, **options: object) -> None:
    raise AssertionError("a chain of calls is planned without the solver")


@pytest.fixture
def placements(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Act]]:
    """What the allocator's placement was simulated for; the plan's solver may not be called."""
    placed.known_held_bytes.cache_clear()
    monkeypatch.setattr(optimal, "solve_milp", _no_solver)
    simulate = placed.reserved_bytes
    asked: list[Sequence[Act]] = []

    def counted(simulator: Simulator, acts: Sequence[Act], trim: bool = False) -> int | None:
        asked.append(acts)
        return simulate(simulator, acts, trim)

    monkeypatch.setattr(placed, "reserved_bytes", counted)
    return asked


@pytest.mark.parametrize(
    ("mib", "slowdown"),
    [(22888, 1.002), (19073, 1.015), (15259, 1.065), (11921, 1.18), (11400, 1.29), (11000, 1.55)],
)
def test_what_the_allocator_holds_stays_under_a_tight_budget(
    profile: Profile, placements: list[Sequence[Act]], mib: int, slowdown: float
) -> None:
    begun = time.process_time()  # other processes may be busy
    plan = make_plan(profile, Goal(budget_bytes=mib * MIB))
    assert time.process_time() - begun < LIMIT_S
    assert plan.predicted.peak_bytes <= plan.predicted.reserved_bytes <= mib * MIB
    assert plan.predicted.step_s < slowdown * plan.baseline_step_s
    assert not plan.trim
    assert len(placements) < MAX_PLACEMENTS


def test_the_smallest_budget_is_found_without_the_solver_and_less_is_refused(
    profile: Profile, placements: list[Sequence[Act]]
) -> None:
    least, _ = minimum_feasible(profile)
    plan = make_plan(profile, Goal(budget_bytes=least))
    assert plan.predicted.reserved_bytes <= least
    with pytest.raises(InfeasibleError) as refused:
        make_plan(profile, Goal(budget_bytes=int(0.99 * least)))
    assert refused.value.minimum_bytes == least
    assert len(placements) < MAX_PLACEMENTS


def test_a_plan_that_keeps_everything_names_the_smallest_budget_without_the_solver(
    profile: Profile, placements: list[Sequence[Act]]
) -> None:
    plan = make_plan(profile, Goal(strategy="none"))
    assert plan.minimum_feasible_bytes < plan.predicted.peak_bytes


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
