"""The table of a chain against brute force over every set of runs, and where it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.ir.profile import Profile
from memfit.ir.step_graph import Hold
from memfit.planning import optimal
from memfit.planning.acts import Act
from memfit.planning.chain import TIED_UNITS, Chain
from memfit.planning.rows import MemoryRows
from memfit.planning.simulate import Simulator

Profiles = Callable[..., st.SearchStrategy[Profile]]
Build = Callable[..., Profile]
DisjointRuns = Callable[..., Any]


def _chain_of(simulator: Simulator, acts: Sequence[Act]) -> Chain:
    """The chain with a row for every position of the step."""
    rows = MemoryRows(simulator, acts)
    chain = Chain(
        len(simulator.graph.calls),
        acts,
        [simulator.seconds_of(act) for act in acts],
        [simulator.host_seconds_of(act) for act in acts],
        simulator.profile.host_slack_s,
        rows.at(simulator.graph.model_end),
    )
    for row in [*map(rows.at, range(simulator.graph.length)), *rows.insides()]:
        chain.add(row)
    return chain


def _compare(profile: Profile, every_set: DisjointRuns, data: st.DataObject) -> bool:
    """Compare a chain at some budget with all sets of runs; False where the step is none."""
    simulator = Simulator(profile)
    longest = len(profile.graph.calls)
    chain = _chain_of(simulator, profile.graph.runs(longest))
    if not chain.unbroken:
        return False
    sets = {runs: simulator.peak_bytes(runs) for runs in every_set(profile.graph, longest)}
    peaks = sorted(set(sets.values()))
    assert chain.lowest_budget() == peaks[0]
    budget = data.draw(st.sampled_from(peaks)) + data.draw(st.sampled_from([-1, 0, 1]))
    found = chain.fastest(budget)
    fitting = [simulator.extra_seconds(runs) for runs, peak in sets.items() if peak <= budget]
    assert (found is None) == (not fitting)
    if found is not None:
        acts, proven_s = found
        assert sets[acts] <= budget
        assert proven_s <= min(fitting) + 1e-12
        if not any(t.recompute_host_s for t in profile.call_times):
            added_s = simulator.extra_seconds(acts)
            assert added_s <= min(fitting) * (1 + len(acts) / TIED_UNITS) + 1e-12
    return True


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_chain_of_unlike_layers_is_solved_as_by_brute_force(
    data: st.DataObject, chain: Build, disjoint_runs: DisjointRuns
) -> None:
    layers = data.draw(st.integers(1, 5))
    profile = chain(layers)
    sizes = data.draw(st.lists(st.integers(1, 3000), min_size=2 * layers, max_size=2 * layers))
    blocks = (replace(b, bytes=n) for b, n in zip(profile.graph.blocks, sizes, strict=True))
    seconds = data.draw(st.lists(st.integers(1, 30), min_size=layers, max_size=layers))
    times = (
        replace(t, recompute_s=s / 100) for t, s in zip(profile.call_times, seconds, strict=True)
    )
    graph = replace(profile.graph, blocks=tuple(blocks))
    assert _compare(replace(profile, graph=graph, call_times=tuple(times)), disjoint_runs, data)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_chain_whose_outputs_two_calls_hold_is_solved_as_by_brute_force(
    data: st.DataObject, chain: Build, disjoint_runs: DisjointRuns
) -> None:
    """As in a residual network; the running code may have some of them for long."""
    layers = data.draw(st.integers(2, 5))
    profile = chain(layers)
    blocks, late = [], data.draw(st.sets(st.integers(0, layers - 1), max_size=2))
    for block in profile.graph.blocks:
        call = profile.graph.calls[block.call]
        if block.id % 2 and call.index < layers - 1:  # what it hands to the next call
            block = replace(block, holds=(*block.holds, Hold(call.index, call.done, call.done)))
            if call.index in late:
                block = replace(block, death=profile.graph.model_end - 1)
        blocks.append(replace(block, bytes=data.draw(st.integers(1, 3000))))
    graph = replace(profile.graph, blocks=tuple(blocks))
    seconds = data.draw(st.lists(st.integers(1, 30), min_size=layers, max_size=layers))
    times = (
        replace(t, recompute_s=s / 100) for t, s in zip(profile.call_times, seconds, strict=True)
    )
    assert _compare(replace(profile, graph=graph, call_times=tuple(times)), disjoint_runs, data)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_passes_for_a_chain_is_solved_as_by_brute_force(
    data: st.DataObject, random_profiles: Profiles, disjoint_runs: DisjointRuns
) -> None:
    _compare(data.draw(random_profiles(4)), disjoint_runs, data)


def test_the_host_is_weighed_where_it_cannot_keep_up(chain: Build) -> None:
    """Two ways to make room: one is dear for the device, the other for the host."""
    profile = chain(3)
    first, second, third = profile.call_times
    times = (
        replace(first, recompute_s=0.2, recompute_host_s=0.0),
        replace(second, recompute_s=0.1, recompute_host_s=0.5),
        third,
    )
    simulator = Simulator(replace(profile, call_times=times))
    both: list[Act] = [(0, 0), (1, 1)]
    budget = max(simulator.peak_bytes([act]) for act in both)
    assert budget < simulator.peak_bytes([])
    found = _chain_of(simulator, both).fastest(budget)
    assert found is not None
    assert found[0] == ((0, 0),)
    assert 0.1 < found[1] <= 0.2


def test_barred_acts_are_not_chosen(chain: Build) -> None:
    profile = chain(4)
    simulator = Simulator(profile)
    acts: list[Act] = [(c, c) for c in range(4)]
    solved = _chain_of(simulator, acts)
    budget = simulator.peak_bytes([acts[1]])
    free, barred = solved.fastest(budget), solved.fastest(budget, barred={1, 2})
    assert free is not None and barred is not None
    assert set(barred[0]) <= {acts[0], acts[3]}
    assert solved.lowest_budget({0, 1, 2, 3}) == simulator.peak_bytes([])


def test_a_large_chain_needs_no_solver(chain: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty layers took the solver seconds for every budget."""
    monkeypatch.setattr(optimal, "solve_milp", None)
    simulator = Simulator(chain(40))
    low, high = optimal.smallest(simulator), simulator.peak_bytes([])
    assert low is not None
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        lowest = simulator.peak_bytes(low.acts)
        budget = lowest + int(share * (high - lowest))
        solution = optimal.fastest(simulator, budget)
        assert solution is not None and not solution.stopped
        assert simulator.peak_bytes(solution.acts) <= budget
        added_s = simulator.extra_seconds(solution.acts)
        assert solution.lower_bound_s <= added_s <= 1.002 * solution.lower_bound_s


def test_few_acts_are_left_to_the_solver(chain: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimal, "Chain", None)
    simulator = Simulator(chain(4))
    assert optimal.fastest(simulator, simulator.peak_bytes([(0, 0)])) is not None
