"""`optimal` against brute force over every set of runs, on steps small enough for that."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.ir.profile import Profile
from memfit.planning import optimal
from memfit.planning.acts import Run
from memfit.planning.simulate import Simulator
from memfit.planning.strategies import STRATEGIES, Request

Profiles = Callable[..., st.SearchStrategy[Profile]]
DisjointRuns = Callable[..., Any]
# Beside the seconds, the objective weighs the peak a little, and the solver stops this near.
TIME_TOLERANCE = optimal.PEAK_WEIGHT + 2e-4


def _table(profile: Profile, disjoint_runs: DisjointRuns) -> list[tuple[int, float]]:
    """Peak and seconds of recompute of every possible plan."""
    simulator = Simulator(profile)
    longest = optimal.longest_run(simulator)
    return [
        (simulator.peak_bytes(runs), simulator.step_seconds(runs) - profile.step_s)
        for runs in disjoint_runs(profile.graph, longest)
    ]


def _everything(profile: Profile) -> float:
    """Seconds of recomputing every call: what the solver's tolerance is a share of."""
    return Simulator(profile).extra_seconds([(c, c) for c in range(len(profile.graph.calls))])


def _draw_budget(data: st.DataObject, table: list[tuple[int, float]]) -> int:
    """A budget at, just under or between the peaks that plans reach."""
    peaks = sorted({peak for peak, _ in table})
    near = data.draw(st.sampled_from(peaks)) + data.draw(st.sampled_from([-1, 0, 1]))
    anywhere = data.draw(st.integers(peaks[0] - 1, peaks[-1]))
    return max(1, data.draw(st.sampled_from([near, anywhere])))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_fastest_is_as_fast_as_brute_force(
    data: st.DataObject, random_profiles: Profiles, disjoint_runs: DisjointRuns
) -> None:
    profile = data.draw(random_profiles(5, accumulate=2))
    table = _table(profile, disjoint_runs)
    budget = _draw_budget(data, table)
    best = min((s for peak, s in table if peak <= budget), default=None)
    simulator = Simulator(profile)
    solution = optimal.fastest(simulator, budget)
    assert (solution is None) == (best is None)
    if solution is not None and best is not None:
        assert simulator.peak_bytes(solution.acts) <= budget
        seconds = simulator.extra_seconds(solution.acts)
        total = _everything(profile)
        slack = TIME_TOLERANCE * total * max(1.0, budget / simulator.peak_bytes([]))
        assert seconds <= best + slack
        assert solution.lower_bound_s <= best + 1e-6
        assert not solution.stopped


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_smallest_has_the_lowest_peak_there_is(
    data: st.DataObject, random_profiles: Profiles, disjoint_runs: DisjointRuns
) -> None:
    profile = data.draw(random_profiles(5, accumulate=2))
    lowest = min(peak for peak, _ in _table(profile, disjoint_runs))
    simulator = Simulator(profile)
    peak = simulator.peak_bytes(optimal.smallest(simulator).acts)
    assert lowest <= peak <= lowest + TIME_TOLERANCE * simulator.peak_bytes([]) + 1


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_bound_holds_for_every_plan_and_closes(
    data: st.DataObject, random_profiles: Profiles, disjoint_runs: DisjointRuns
) -> None:
    profile = data.draw(random_profiles(5))
    table = _table(profile, disjoint_runs)
    budget = _draw_budget(data, table)
    solution = optimal.fastest(Simulator(profile), budget)
    if solution is not None:
        total = _everything(profile)
        feasible = [seconds for peak, seconds in table if peak <= budget]
        assert solution.lower_bound_s <= min(feasible) + 1e-6
        assert solution.lower_bound_s >= min(feasible) - 3 * TIME_TOLERANCE * total


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_optimal_is_never_slower_than_another_strategy(
    data: st.DataObject, random_profiles: Profiles
) -> None:
    profile = data.draw(random_profiles(8))
    simulator = Simulator(profile)
    low = simulator.peak_bytes(optimal.smallest(simulator).acts)
    budget = data.draw(st.integers(low, max(low, simulator.peak_bytes([]))))
    request = Request(budget, float("inf"))
    best = STRATEGIES["optimal"](simulator, request)
    assert best is not None
    assert simulator.peak_bytes(best.acts) <= budget
    total = _everything(profile)
    for name, strategy in STRATEGIES.items():
        other = strategy(simulator, request)
        if other is not None and simulator.peak_bytes(other.acts) <= budget:
            limit = simulator.step_seconds(other.acts) + TIME_TOLERANCE * total
            assert simulator.step_seconds(best.acts) <= limit, name


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_time_is_monotone_in_the_budget_and_answers_repeat(
    data: st.DataObject, random_profiles: Profiles
) -> None:
    profile = data.draw(random_profiles(6))
    simulator = Simulator(profile)
    low, high = simulator.peak_bytes(optimal.smallest(simulator).acts), simulator.peak_bytes([])
    budgets = sorted({low, high, *(low + (high - low) * k // 4 for k in range(1, 4))})
    total = _everything(profile)
    runs: list[tuple[Run, ...]] = []
    for budget in budgets:
        solution = optimal.fastest(Simulator(profile), budget)
        again = optimal.fastest(Simulator(profile), budget)
        assert solution is not None
        assert solution == again
        runs.append(solution.acts)
    seconds = [simulator.step_seconds(r) for r in runs]
    for tighter, looser in pairwise(seconds):
        assert looser <= tighter + TIME_TOLERANCE * total
    assert runs[-1] == (), "the whole peak needs no recompute"


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_solved_step_gives_the_same_answer_after_other_budgets(
    data: st.DataObject, random_profiles: Profiles
) -> None:
    """Rows found for one budget must not change what another budget gets."""
    profile = data.draw(random_profiles(6))
    used = Simulator(profile)
    low, high = used.peak_bytes(optimal.smallest(used).acts), used.peak_bytes([])
    for budget in (high, (low + high) // 2, low, (low + high) // 2):
        fresh = optimal.fastest(Simulator(profile), budget)
        again = optimal.fastest(used, budget)
        assert fresh is not None and again is not None
        total = _everything(profile)
        difference = used.step_seconds(fresh.acts) - used.step_seconds(again.acts)
        assert abs(difference) <= TIME_TOLERANCE * total


def test_plans_a_byte_over_the_budget_do_not_hide_those_that_fit(
    chain: Callable[..., Profile],
) -> None:
    """The solver takes 1e-6 of the peak for nothing; a gigabyte more or less a byte is real."""
    profile = chain(12, inner=10**8, output=10**7, static=10**9)
    simulator = Simulator(profile)
    for count in range(1, 6):
        runs = tuple((c, c) for c in range(count))
        fits = tuple((c, c) for c in range(count + 1))
        budget = simulator.peak_bytes(runs) - 1
        assert simulator.peak_bytes(fits) <= budget
        solution = optimal.fastest(simulator, budget)
        assert solution is not None
        assert simulator.peak_bytes(solution.acts) <= budget
        limit = simulator.step_seconds(fits) + TIME_TOLERANCE * 1.2
        assert simulator.step_seconds(solution.acts) <= limit
        assert solution.lower_bound_s <= 0.1 * (count + 1) + 1e-6
