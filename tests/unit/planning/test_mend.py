"""Choices that miss a budget where they are placed, mended by single changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from memfit.ir.profile import Profile
from memfit.planning import optimal
from memfit.planning.acts import Act, calls_of
from memfit.planning.mend import mended
from memfit.planning.simulate import Simulator

Chain = Callable[..., Profile]
Held = Callable[[Sequence[Act]], int]
HOLE = 1500
LEAVING_HOLES = (4, 5, 6)
ACTS: tuple[Act, ...] = ((0, 0), (1, 1))


@pytest.fixture
def simulator(chain: Chain) -> Simulator:
    return Simulator(chain(8))


@pytest.fixture
def held(simulator: Simulator) -> Held:
    """Live bytes, and a hole for each of some calls that is kept."""

    def of(acts: Sequence[Act]) -> int:
        kept = set(LEAVING_HOLES) - {call for act in acts for call in calls_of(act)}
        return simulator.peak_bytes(acts) + len(kept) * HOLE

    return of


@pytest.fixture
def single(simulator: Simulator) -> list[Act]:
    return [act for act in optimal.candidates(simulator) if len(calls_of(act)) == 1]


def test_a_change_that_wins_enough_is_made(
    simulator: Simulator, held: Held, single: list[Act]
) -> None:
    tries = iter(range(50))
    found = mended(simulator, ACTS, single, held, held(ACTS) - HOLE, tries)
    assert found == (*ACTS, (4, 4)), "others that were looked at before win too little"
    assert next(tries) < 10, "no more was looked at than had to be"


def test_several_changes_are_made_where_one_is_not_enough(
    simulator: Simulator, held: Held, single: list[Act]
) -> None:
    budget = simulator.peak_bytes(ACTS)
    found = mended(simulator, ACTS, single, held, budget, iter(range(50)))
    assert found is not None and held(found) <= budget
    assert set(ACTS) < set(found)
    added = {act[0] for act in set(found) - set(ACTS) if isinstance(act, tuple)}
    assert len(added) == 2 and added < set(LEAVING_HOLES), "those that win most"


def test_nothing_is_found_without_tries_or_without_a_change_that_helps(
    simulator: Simulator, held: Held, single: list[Act]
) -> None:
    budget = held(ACTS) - HOLE
    assert mended(simulator, ACTS, single, held, budget, iter(())) is None

    def always(acts: Sequence[Act]) -> int:
        return budget + 1

    assert mended(simulator, ACTS, single, always, budget, iter(range(500))) is None


def test_steps_slower_than_one_that_is_known_take_no_tries(
    simulator: Simulator, held: Held, single: list[Act]
) -> None:
    budget = held(ACTS) - HOLE
    tries = iter(range(50))
    found = mended(simulator, ACTS, single, held, budget, tries)
    assert found is not None
    looked, seconds = next(tries), simulator.step_seconds(found)
    tries = iter(range(50))
    assert mended(simulator, ACTS, single, held, budget, tries, seconds) is None
    assert next(tries) < looked
    assert mended(simulator, ACTS, single, held, budget, tries, 1.01 * seconds) == found
