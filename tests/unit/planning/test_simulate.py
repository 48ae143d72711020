"""The simulator against a plain interpreter on random steps, and its rows against itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.ir.profile import Profile
from memfit.ir.step_graph import CATEGORIES, Block
from memfit.planning.acts import Run
from memfit.planning.rows import MemoryRows, Row
from memfit.planning.simulate import Simulator

Profiles = Callable[..., st.SearchStrategy[Profile]]
LONGEST = 6


def _draw_runs(data: st.DataObject, profile: Profile) -> tuple[Run, ...]:
    """Any set of runs that do not overlap."""
    runs: list[Run] = []
    candidates = profile.graph.runs(LONGEST)
    for run in data.draw(st.permutations(candidates)) if candidates else []:
        if all(run[1] < first or last < run[0] for first, last in runs) and data.draw(
            st.booleans()
        ):
            runs.append(run)
    return tuple(sorted(runs))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_peak_and_curve_are_the_interpreters(
    data: st.DataObject, random_profiles: Profiles, interpret: Callable[..., Any]
) -> None:
    profile = data.draw(random_profiles(6, accumulate=2))
    runs = _draw_runs(data, profile)
    expected = interpret(profile, runs)
    simulator = Simulator(profile)
    assert simulator.peak_bytes(runs) == expected.peak_bytes
    timeline = simulator.timeline(runs)
    points = [p for p in timeline.points if not p.where.startswith("recompute ")]
    assert [p.total for p in points] == expected.totals
    for point, sizes in zip(points, expected.curve, strict=True):
        assert point.bytes == {n: s for n, s in sizes.items() if s or n in point.bytes}
    replays = {p.position: p.total for p in timeline.points if p.where.startswith("recompute ")}
    assert replays == expected.inside


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_timeline_categories_sum_to_the_total_and_its_peak_is_the_peak(
    data: st.DataObject, random_profiles: Profiles
) -> None:
    profile = data.draw(random_profiles(6, accumulate=2))
    runs = _draw_runs(data, profile)
    simulator = Simulator(profile)
    timeline = simulator.timeline(runs)
    assert timeline.peak_bytes == simulator.peak_bytes(runs)
    assert sum(timeline.peak_categories.values()) == timeline.peak_bytes
    for point in timeline.points:
        assert set(point.bytes) <= set(CATEGORIES)
        assert min(point.bytes.values()) >= 0
        assert sum(point.bytes.values()) == point.total <= timeline.peak_bytes


def _evaluate(row: Row, rows: MemoryRows, runs: Sequence[Run], calls: int) -> int:
    """The row's bytes when exactly `runs` are chosen."""
    chosen = {rows.acts.index(run) for run in runs}
    kept = set(range(calls)) - {c for first, last in runs for c in range(first, last + 1)}
    total = row.constant + sum(int(row.coefficients[n]) for n in chosen)
    for holders, size in row.shared.items():
        if any((h.kept and h.call in kept) or h.acts & chosen for h in holders):
            total += size
    return total


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_rows_are_linear_pictures_of_the_curve(
    data: st.DataObject, random_profiles: Profiles
) -> None:
    profile = data.draw(random_profiles(6, accumulate=2))
    runs = _draw_runs(data, profile)
    simulator = Simulator(profile)
    rows = MemoryRows(simulator, profile.graph.runs(LONGEST))
    timeline = simulator.timeline(runs)
    totals = {p.position: p.total for p in timeline.points if "recompute" not in p.where}
    inside = {p.position: p.total for p in timeline.points if "recompute" in p.where}
    calls = len(profile.graph.calls)
    for position in range(profile.graph.length):
        assert _evaluate(rows.at(position), rows, runs, calls) == totals[position], position
    moments = sorted({m[0] for act in rows.acts for m in simulator.effect(act).inside})
    for moment, row in zip(moments, rows.insides(), strict=True):
        assert _evaluate(row, rows, runs, calls) == inside.get(moment, totals[moment])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_positions_over_a_budget_are_worst_of_their_stretch(
    data: st.DataObject, random_profiles: Profiles
) -> None:
    profile = data.draw(random_profiles(5))
    runs = _draw_runs(data, profile)
    simulator = Simulator(profile)
    budget = data.draw(st.integers(1, simulator.peak_bytes(runs)))
    totals = [p.total for p in simulator.timeline(runs).points if "recompute" not in p.where]
    over = simulator.over(runs, budget)
    above = {p for p, total in enumerate(totals) if total > budget}
    assert set(over) <= above
    assert bool(over) == bool(above)
    for position in above:
        stretch = {position}
        for step in (-1, 1):
            at = position
            while at + step in above:
                at += step
                stretch.add(at)
        (worst,) = stretch & set(over)
        assert totals[worst] == max(totals[p] for p in stretch)


def test_seconds_add_up(chain: Callable[..., Profile]) -> None:
    profile = chain(4)
    simulator = Simulator(profile)
    assert simulator.seconds_of((1, 2)) == pytest.approx(0.2)
    assert simulator.step_seconds([(0, 0), (2, 3)]) == pytest.approx(profile.step_s + 0.3)
    for passes in ({"accumulate": 2}, {"looks_first": True}):
        assert Simulator(chain(4, **passes)).seconds_of((1, 2)) == pytest.approx(0.4)


def test_gradients_that_stood_when_a_step_was_recorded_stay_as_they_are(
    chain: Callable[..., Profile],
) -> None:
    profile = chain(4, accumulate=2)
    graph, number = profile.graph, len(profile.graph.blocks)
    waiting = Block(number, 1000, 0, graph.length, "gradients")
    graph = replace(graph, blocks=(*graph.blocks, waiting))
    before, after = (Simulator(replace(profile, graph=g)) for g in (profile.graph, graph))
    assert after.peak_bytes([]) == before.peak_bytes([]) + 1000
    assert after.graph.static == before.graph.static


def test_the_host_counts_where_it_cannot_keep_up(chain: Callable[..., Profile]) -> None:
    profile = chain(4)
    times = tuple(replace(t, recompute_host_s=0.25) for t in profile.call_times)
    simulator = Simulator(replace(profile, call_times=times, host_slack_s=0.3))
    assert simulator.host_seconds_of((1, 2)) == pytest.approx(0.5)
    # One call: 0.25 s of the host hide in its slack, the device needs 0.1 s more.
    assert simulator.extra_seconds([(0, 0)]) == pytest.approx(0.1)
    # Three calls: the host needs 0.75 s, of which 0.3 s are hidden.
    assert simulator.extra_seconds([(0, 0), (1, 2)]) == pytest.approx(0.45)
    assert simulator.extra_seconds([]) == 0


def test_a_known_chain_by_hand(chain: Callable[..., Profile]) -> None:
    """Four layers save 1000 bytes each and pass 100 on; static bytes are 5000."""
    simulator = Simulator(chain(4))
    assert simulator.peak_bytes([]) == 5000 + 4 * 1000 + 4 * 100
    # Recomputing the last layer frees nothing: all is there while it runs, first time or again.
    assert simulator.peak_bytes([(3, 3)]) == simulator.peak_bytes([])
    # Two recomputed as one keep only what enters the run: 100 bytes less than two by themselves.
    assert simulator.peak_bytes([(0, 0), (1, 1)]) == 5000 + 2 * 1000 + 4 * 100
    assert simulator.peak_bytes([(0, 1)]) == 5000 + 2 * 1000 + 3 * 100
    names = {p.where for p in simulator.timeline([(1, 2)]).points}
    assert {"forward layers.0", "backward layers.3", "recompute layers.1..layers.2"} <= names
