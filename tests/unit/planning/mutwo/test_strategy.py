"""The strategy on steps of captured calls: what it picks, and that the budget holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from memfit.ir.profile import CopyRates, Profile
from memfit.planning.acts import Pick
from memfit.planning.mutwo.strategy import choose_mutwo
from memfit.planning.request import Choice, Request
from memfit.planning.simulate import Simulator

MIB = 2**20
X, A, B = 0, 2, 3
Captured = Callable[..., Profile]


def _rates(mib_per_s: float) -> CopyRates:
    return CopyRates(mib_per_s * MIB, mib_per_s * MIB)


def _choose(simulator: Simulator, share: float | None, **options: int) -> Choice:
    """With a budget of a share of what the step takes; None: without one."""
    budget = None if share is None else int(share * simulator.peak_bytes([]))
    choice = choose_mutwo(simulator, Request(budget, float("inf"), **options))
    assert choice is not None
    return choice


def _counts(simulator: Simulator, choice: Choice) -> tuple[int, int]:
    """Tensors that are swapped and tensors that are recomputed."""
    picks = [act for act in choice.acts if isinstance(act, Pick)]
    variants = [simulator.variant(pick) for pick in picks]
    again = sum(len({X, A, B} - set(v.saved)) for v in variants)
    return sum(len(v.moved) for v in variants), again


def test_a_step_that_fits_is_left_as_it_is(captured: Captured) -> None:
    simulator = Simulator(captured(4, _rates(1)))
    assert _choose(simulator, 1.0).acts == ()


def test_without_copies_all_but_inputs_is_recomputed(captured: Captured) -> None:
    simulator = Simulator(captured(4))
    choice = _choose(simulator, None)
    assert _counts(simulator, choice) == (0, 8)
    assert {simulator.variant(act).saved for act in choice.acts} == {(X,)}


def test_with_endless_bandwidth_all_is_swapped(captured: Captured) -> None:
    simulator = Simulator(captured(4, _rates(1e9)))
    choice = _choose(simulator, None)
    assert _counts(simulator, choice) == (12, 0)
    assert simulator.extra_seconds(choice.acts) == pytest.approx(0, abs=1e-6)


def test_in_between_both_are_chosen(captured: Captured) -> None:
    """A call's backward takes 12 s: a copy of b hides behind that and its like do not."""
    simulator = Simulator(captured(6, _rates(0.5)))
    swapped, recomputed = _counts(simulator, _choose(simulator, 0.5))
    assert swapped > 0 and recomputed > 0


@pytest.mark.parametrize("mib_per_s", [None, 0.25, 1.0, 4.0, 100.0])
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_the_budget_holds(captured: Captured, mib_per_s: float | None, share: float) -> None:
    simulator = Simulator(captured(6, None if mib_per_s is None else _rates(mib_per_s)))
    choice = _choose(simulator, share)
    assert simulator.peak_bytes(choice.acts) <= share * simulator.peak_bytes([])


def test_the_same_step_gets_the_same_acts(captured: Captured) -> None:
    profile = captured(6, _rates(0.5))
    first, second = Simulator(profile), Simulator(profile)
    assert _choose(first, 0.6) == _choose(second, 0.6)
    assert _choose(first, 0.6) == _choose(first, 0.6), "what was tried leaves no trace"


def test_menus_get_what_is_chosen_and_nothing_that_was_only_tried(captured: Captured) -> None:
    simulator = Simulator(captured(6, _rates(0.5)))
    before = len(simulator.menus[0])
    choice = _choose(simulator, 0.5)
    used = {act.variant for act in choice.acts if isinstance(act, Pick)}
    assert len(simulator.menus[0]) <= before + len(used)


def test_a_budget_that_cannot_be_met_gives_all_there_is(captured: Captured) -> None:
    simulator = Simulator(captured(4))
    choice = choose_mutwo(simulator, Request(1, float("inf")))
    assert choice is not None and _counts(simulator, choice) == (0, 8)


def test_no_more_waits_on_the_host_than_it_has_room_for(captured: Captured) -> None:
    simulator = Simulator(captured(4, _rates(1e9)))
    choice = _choose(simulator, None, host_bytes=20 * MIB)
    assert 0 < simulator.host_bytes(choice.acts) <= 20 * MIB


def test_only_what_is_allowed_is_done(captured: Captured) -> None:
    profile = captured(4, _rates(1))
    swapped, recomputed = _counts(
        simulator := Simulator(profile, 0, ("recompute",)), _choose(simulator, None)
    )
    assert swapped == 0 and recomputed == 8
    swapped, recomputed = _counts(
        simulator := Simulator(profile, 0, ("offload",)), _choose(simulator, None)
    )
    assert swapped == 12 and recomputed == 0


def test_copies_back_start_early_enough_not_to_wait(captured: Captured) -> None:
    """Four MiB a second take a call's 13 MiB in about three of its backward's twelve seconds."""
    simulator = Simulator(captured(6, _rates(4)))
    choice = _choose(simulator, 0.7)
    assert _counts(simulator, choice)[0] > 0
    assert simulator.traffic(choice.acts).stall_s == 0.0
    moving = [act for act in choice.acts if isinstance(act, Pick)]
    assert all(act.prefetch > act.call for act in moving if simulator.variant(act).moved)


def test_a_step_without_captured_calls_is_left_as_it_is(chain: Captured) -> None:
    assert _choose(Simulator(chain(3)), 0.5).acts == ()


def test_micro_batches(captured: Captured) -> None:
    profile = captured(4, _rates(1))
    profile = replace(profile, accumulate=2, step_s=2 * profile.step_s)
    simulator = Simulator(profile)
    choice = _choose(simulator, 0.7)
    assert choice.acts and simulator.peak_bytes(choice.acts) <= 0.7 * simulator.peak_bytes([])
