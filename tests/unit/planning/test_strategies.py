"""What each strategy does by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from memfit.ir.profile import CallTime, Profile
from memfit.planning import optimal
from memfit.planning.simulate import Simulator
from memfit.planning.strategies import (
    STRATEGIES,
    Request,
    choose_all,
    choose_interval,
    choose_none,
    choose_optimal,
    choose_ratio,
    saved_bytes,
    worthwhile_calls,
)

Chain = Callable[..., Profile]
FREE = Request(None, float("inf"))


def _with_calls(profile: Profile, **changes: dict[int, Any]) -> Profile:
    """The profile with fields of some calls changed: `leaf={0: True}`."""
    calls = list(profile.graph.calls)
    for name, values in changes.items():
        for index, value in values.items():
            calls[index] = replace(calls[index], **{name: value})
    return replace(profile, graph=replace(profile.graph, calls=tuple(calls)))


def test_names() -> None:
    assert list(STRATEGIES) == [
        "optimal",
        "ratio",
        "interval",
        "swap",
        "mutwo",
        "all",
        "none",
    ]


def test_none_keeps_everything(chain: Chain) -> None:
    assert choose_none(Simulator(chain(5)), Request(1, 0.0)).acts == ()


def test_all_recomputes_each_by_itself_but_not_leaves_and_pinned(chain: Chain) -> None:
    profile = _with_calls(chain(5), leaf={1: True}, pinned={3: "why"}, need={4: -1})
    simulator = Simulator(profile)
    assert worthwhile_calls(simulator) == [0, 2]
    assert choose_all(simulator, FREE).acts == ((0, 0), (2, 2))


@pytest.mark.parametrize("layers", [9, 16, 25, 36])
def test_best_interval_of_a_chain_lies_near_the_square_root(chain: Chain, layers: int) -> None:
    # Each layer saves nothing but as much as it passes on, as in Chen et al.'s analysis.
    simulator = Simulator(chain(layers, inner=100, output=100))
    runs = choose_interval(simulator, FREE).acts
    length = max(last - first + 1 for first, last in runs)
    assert 0.5 * math.sqrt(layers) <= length <= 2 * math.sqrt(layers)
    peaks = {
        k: simulator.peak_bytes(choose_interval(simulator, replace(FREE, interval=k)).acts)
        for k in range(1, layers + 1)
    }
    assert simulator.peak_bytes(runs) == min(peaks.values())
    assert min(peaks.values()) < min(peaks[1], peaks[layers])


def test_interval_groups_k_calls_and_stops_where_a_chain_ends(chain: Chain) -> None:
    simulator = Simulator(chain(7))
    given = replace(FREE, interval=3)
    assert choose_interval(simulator, given).acts == ((0, 2), (3, 5), (6, 6))
    broken = Simulator(_with_calls(chain(7), chained={2: False}, leaf={5: True}))
    assert choose_interval(broken, given).acts == ((0, 1), (2, 4), (6, 6))


def test_interval_of_nothing(chain: Chain) -> None:
    leaves = _with_calls(chain(2), leaf={0: True, 1: True})
    assert choose_interval(Simulator(leaves), FREE).acts == ()


def test_ratio_takes_most_bytes_per_second_first_and_stops_at_the_budget(chain: Chain) -> None:
    profile = chain(5)
    costs = [0.3, 0.1, 0.4, 0.2, 0.5]
    profile = replace(profile, call_times=tuple(CallTime(c, c, c, 0.0) for c in costs))
    simulator = Simulator(profile)
    # Its own 1000 bytes and its input, which nobody saved before it.
    assert [saved_bytes(simulator, c) for c in range(3)] == [1000, 1100, 1100]
    whole = simulator.peak_bytes([])
    one = choose_ratio(simulator, Request(whole - 1, float("inf")))
    assert one is not None and one.acts == ((1, 1),)
    two = choose_ratio(simulator, Request(simulator.peak_bytes(one.acts) - 1, float("inf")))
    assert two is not None and two.acts == ((1, 1), (3, 3))
    enough = choose_ratio(simulator, Request(whole, float("inf")))
    assert enough is not None and enough.acts == ()


def test_ratio_respects_the_limit_on_seconds(chain: Chain) -> None:
    costs = [0.3, 0.1, 0.4, 0.2, 0.5]
    profile = replace(chain(5), call_times=tuple(CallTime(c, c, c, 0.0) for c in costs))
    simulator = Simulator(profile)
    choice = choose_ratio(simulator, Request(1, 0.65))
    assert choice is not None
    # 0.1 + 0.2 + 0.3 fits; 0.4 and 0.5 would break the limit and are passed over.
    assert choice.acts == ((0, 0), (1, 1), (3, 3))
    without_budget = choose_ratio(simulator, Request(None, 0.31))
    assert without_budget is not None and without_budget.acts == ((1, 1), (3, 3))


def test_optimal_without_a_budget_is_the_smallest(chain: Chain) -> None:
    simulator = Simulator(chain(9))
    choice = choose_optimal(simulator, FREE)
    assert choice is not None
    lowest = simulator.peak_bytes(optimal.smallest(simulator).acts)
    assert simulator.peak_bytes(choice.acts) == lowest
    assert lowest <= simulator.peak_bytes(choose_interval(simulator, FREE).acts)


def test_optimal_merges_calls_where_single_ones_do_not_fit(chain: Chain) -> None:
    simulator = Simulator(chain(16, inner=100, output=100))
    singles = simulator.peak_bytes(choose_all(simulator, FREE).acts)
    choice = choose_optimal(simulator, Request(singles - 200, float("inf")))
    assert choice is not None
    assert simulator.peak_bytes(choice.acts) <= singles - 200
    assert any(last > first for first, last in choice.acts)


def test_optimal_says_no(chain: Chain) -> None:
    simulator = Simulator(chain(6))
    low = simulator.peak_bytes(optimal.smallest(simulator).acts)
    assert choose_optimal(simulator, Request(low // 2, float("inf"))) is None


def test_an_interrupt_in_the_solver_keeps_the_best_plan_found(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulator = Simulator(chain(8))
    budget = int(simulator.peak_bytes([]) * 0.8)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(optimal, "fastest", interrupted)
    choice = choose_optimal(simulator, Request(budget, float("inf")))
    assert choice is not None and choice.acts
    assert simulator.peak_bytes(choice.acts) <= budget
    assert choice.note is not None and "interrupted" in choice.note
    assert choice.lower_bound_s == 0.0


def test_an_interrupt_without_any_plan_goes_on_up(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(optimal, "fastest", interrupted)
    with pytest.raises(KeyboardInterrupt):
        choose_optimal(Simulator(chain(8)), Request(5001, float("inf")))


def test_a_step_without_anything_to_recompute(chain: Chain) -> None:
    """A model of single layers has no candidate run at all."""
    simulator = Simulator(_with_calls(chain(1), leaf={0: True}))
    whole = simulator.peak_bytes([])
    assert optimal.smallest(simulator).acts == ()
    solution = optimal.fastest(simulator, whole)
    assert solution is not None and solution.acts == ()
    assert optimal.fastest(simulator, whole - 1) is None
