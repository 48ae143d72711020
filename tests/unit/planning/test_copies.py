"""Copies to the host on their lanes: points, waits, memory; and plans that use them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from operator import ge
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import InfeasibleError
from memfit.ir.profile import CopyRates, Profile
from memfit.planning.acts import Act, Send, calls_of, without_points
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.request import Request
from memfit.planning.rows import MemoryRows
from memfit.planning.simulate import Simulator
from memfit.planning.strategies import choose_optimal, choose_swap
from memfit.planning.write_plan import read_acts

Chain = Callable[..., Profile]
Profiles = Callable[..., st.SearchStrategy[Profile]]
BOTH = ("recompute", "offload")
PLENTY = 10**9  # bytes: a budget that no copy comes near


def _rates(rate: float, **changes: Any) -> CopyRates:
    return replace(CopyRates(rate, rate), **changes)


def _simulator(profile: Profile, rate: float, **changes: Any) -> Simulator:
    return Simulator(replace(profile, copy=_rates(rate, **changes)))


# -- by hand: four layers, 0.1 s forward and 0.2 s backward each, 1000 bytes and 100 passed on ----


def test_a_copy_that_has_time_waits_for_nothing(chain: Chain) -> None:
    simulator = _simulator(chain(4), 10_000)  # 0.1 s each way
    (act,) = simulator.scheduled([Send(0)], PLENTY)
    assert act == Send(0, release=2, prefetch=1)  # out from 0.1 to 0.2; wanted at 1.0
    times = simulator.traffic([act])
    assert (times.out_s, times.in_s, times.stall_s) == pytest.approx((0.1, 0.1, 0.0))
    assert times.hidden_share == 1.0


def test_at_once_means_to_wait(chain: Chain) -> None:
    simulator = _simulator(chain(4), 10_000)
    times = simulator.traffic([Send(0)])
    assert times.stall_s == pytest.approx(0.2)
    assert times.hidden_share == pytest.approx(0.0)
    assert simulator.extra_seconds([Send(0)]) == pytest.approx(0.2)


def test_what_is_saved_when_a_call_ends_does_not_hide_behind_it(chain: Chain) -> None:
    """Predicted to wait 16 ms, a Llama by captured blocks waited 100 on an H200."""
    simulator = _simulator(chain(4), 10_000)
    away = simulator.effect(Send(1)).away  # its own memory, and what it is given
    assert away is not None and away.moments == away.tensors == 2

    def stall_s(moments: int) -> float:
        load = (replace(away, moments=moments), 1100, 1100)
        return simulator.copies.traffic([load], {}).stall_s

    # Layer by layer the first tensor leaves in the middle of the call, from 0.15 to 0.26 both,
    # and the backward begins when the first is back.
    assert stall_s(2) == pytest.approx(0.06 + 0.055)
    assert stall_s(1) == pytest.approx(0.11 + 0.11)


def test_copies_of_one_direction_follow_each_other(chain: Chain) -> None:
    simulator = _simulator(chain(4), 5_000)  # 0.2 and 0.22 s each way
    first, second = simulator.scheduled([Send(0), Send(1)], PLENTY)
    # Out from 0.1 to 0.3 and from there to 0.52, which is after the forward: it waits 0.12 s.
    # Back for call 1, at 0.92 at the latest, then for call 0.
    assert (first.release, second.release) == (3, 4)
    assert simulator.traffic([first, second]).stall_s == pytest.approx(0.12)


@pytest.mark.parametrize("faster", [0.4, 0.76])
def test_where_there_is_room_work_may_be_faster_than_predicted_and_waits_for_nothing(
    chain: Chain, faster: float
) -> None:
    profile = chain(8)
    times = [replace(t, forward_s=faster * t.forward_s) for t in profile.call_times]
    fast = _simulator(replace(profile, call_times=tuple(times)), 10_000)

    def stall_s(unsure: float) -> float:
        acts = _simulator(profile, 10_000).scheduled([Send(0)], PLENTY, unsure)
        return fast.traffic(acts).stall_s

    assert stall_s(0.0) > 0
    assert (stall_s(0.25) == pytest.approx(0)) == (faster > 0.75)


def test_time_to_spare_costs_no_wait_at_any_budget(chain: Chain) -> None:
    simulator = _simulator(chain(6), 12_000)
    moved: list[Act] = [Send(c) for c in range(4)]
    lowest = simulator.peak_bytes(moved)
    spared = 0
    for budget in range(lowest, lowest + 4000, 100):
        just, spare = (simulator.scheduled(moved, budget, unsure) for unsure in (0.0, 0.25))
        assert simulator.peak_bytes(spare) <= budget
        assert simulator.traffic(spare).stall_s <= simulator.traffic(just).stall_s + 1e-9
        spared += spare != just
    assert spared > 10


def test_a_plan_has_time_to_spare_where_it_holds(chain: Chain) -> None:
    profile = replace(chain(8), copy=_rates(10_000))
    simulator = Simulator(profile)
    for less in (800, 1500, 2500):
        goal = Goal(
            budget_bytes=simulator.peak_bytes([]) - less,
            techniques=("offload",),
            host_bytes=PLENTY,
        )
        plan = make_plan(profile, goal)
        acts = read_acts(simulator, plan)
        just = simulator.scheduled(acts, goal.budget_bytes)
        assert plan.host_bytes and simulator.peak_bytes(acts) <= goal.budget_bytes
        assert plan.predicted.step_s <= simulator.step_seconds(just) + 1e-9
        releases = [[a.release for a in found] for found in (acts, just)]
        assert all(map(ge, *releases)) and releases[0] != releases[1]


def test_without_a_budget_the_peak_is_the_lowest(chain: Chain) -> None:
    simulator = _simulator(chain(4), 2_000)
    moved: list[Act] = [Send(c) for c in range(4)]
    scheduled = simulator.scheduled(moved, None)
    assert simulator.peak_bytes(scheduled) == simulator.peak_bytes(moved)
    roomier = simulator.scheduled(moved, PLENTY)
    assert simulator.peak_bytes(roomier) > simulator.peak_bytes(moved)
    assert simulator.step_seconds(roomier) <= simulator.step_seconds(scheduled)


def test_latency_counts_for_every_tensor(chain: Chain) -> None:
    simulator = _simulator(chain(4), 10_000, latency_s=0.01)
    times = simulator.traffic([Send(1)])  # its own memory, and what it is given
    assert times.out_s == pytest.approx(0.11 + 0.02)
    assert simulator.host_seconds_of(Send(1)) == pytest.approx(0.04)


def test_small_tensors_stay(chain: Chain) -> None:
    simulator = _simulator(chain(4), 10_000, latency_s=0.02)  # as long as 200 bytes take
    away = simulator.effect(Send(1)).away
    assert away is not None and simulator.bytes[away.blocks].tolist() == [1000]


def test_where_nothing_runs_beside_a_copy_it_costs_its_seconds(chain: Chain) -> None:
    simulator = _simulator(chain(4), 10_000, drag=1.0)
    acts = simulator.scheduled([Send(0)], PLENTY)
    assert acts == (Send(0, release=1, prefetch=0),)
    assert simulator.traffic(acts).stall_s == 0.0
    assert simulator.extra_seconds(acts) == pytest.approx(0.2)


def test_memory_is_gone_between_its_points(chain: Chain) -> None:
    profile = chain(4)
    simulator = _simulator(profile, 10_000)
    calls = profile.graph.calls
    act = Send(0, release=2, prefetch=1)
    kept, moved = simulator.highest([]), simulator.highest([act])
    gone = [i for i, (a, b) in enumerate(zip(kept, moved, strict=True)) if a != b]
    assert gone == list(range(calls[2].enter, calls[1].need))
    assert {int(kept[i] - moved[i]) for i in gone} == {1000}


def test_a_block_of_two_calls_is_copied_once(chain: Chain) -> None:
    simulator = _simulator(chain(3), 10_000)
    # What call 0 passes on is held by call 1 alone; all that calls 0 and 1 keep is 2100 bytes.
    # On the host each of the three tensors is rounded up, by 511 bytes at most.
    assert simulator.host_bytes([Send(0), Send(1)]) == 2100 + 3 * 511
    loads = simulator.loads([Send(0), Send(1)])
    assert [(out, back) for _, out, back in loads] == [(1000, 1000), (1100, 1100)]


# -- whatever the step ----------------------------------------------------------------------------


def _acts(draw: Any, simulator: Simulator) -> list[Act]:
    """Some calls recomputed by themselves, some sent, some kept."""
    sends = {send.call: send for send in simulator.sends()}
    acts: list[Act] = []
    for call in simulator.graph.calls:
        kinds = ["keep", "send"] if call.pinned or call.leaf else ["keep", "run", "send"]
        kind = draw(st.sampled_from(kinds))
        if kind == "run":
            acts.append((call.index, call.index))
        elif kind == "send" and call.index in sends:
            acts.append(sends[call.index])
    return acts


def test_a_schedule_keeps_to_the_budget_and_waits_no_longer(random_profiles: Profiles) -> None:
    @settings(max_examples=150, deadline=None)
    @given(st.data(), random_profiles(), st.sampled_from([10.0, 1e4, 1e9]), st.floats(0, 1))
    def check(data: st.DataObject, profile: Profile, rate: float, slack: float) -> None:
        simulator = _simulator(profile, rate)
        acts = _acts(data.draw, simulator)
        tight = simulator.peak_bytes(acts)
        budget = int(tight + slack * (simulator.peak_bytes([]) - tight))
        for limit in (budget, None):
            planned = simulator.scheduled(acts, limit)
            assert [without_points(act) for act in planned] == acts
            if limit is not None and tight <= limit:
                assert simulator.peak_bytes(planned) <= limit
            waits = simulator.traffic(planned).stall_s
            assert waits <= simulator.traffic(acts).stall_s + 1e-9
            for away, _, _ in simulator.loads(planned):
                assert away.call < away.release <= len(simulator.graph.calls)
                call = simulator.graph.calls[away.call]
                assert away.returns <= call.need and away.leaves > call.exit - 1

    check()


def test_rows_show_at_least_what_is_there(random_profiles: Profiles) -> None:
    @settings(max_examples=100, deadline=None)
    @given(st.data(), random_profiles())
    def check(data: st.DataObject, profile: Profile) -> None:
        simulator = _simulator(profile, 1e4)
        acts = _acts(data.draw, simulator)
        candidates: list[Act] = [*simulator.graph.runs(1), *simulator.sends()]
        acts = [act for act in acts if act in candidates]
        rows = MemoryRows(simulator, candidates)
        chosen = {candidates.index(act) for act in acts}
        kept = set(range(len(simulator.graph.calls))) - {c for a in acts for c in calls_of(a)}
        curve = simulator.highest(acts)
        insides = {p for act in acts for p, _, _ in simulator.effect(act).inside}
        for position in range(simulator.graph.length):
            if position in insides:
                continue
            row = rows.at(position)
            total = row.constant + sum(int(row.coefficients[n]) for n in chosen)
            total += sum(
                size
                for holders, size in row.shared.items()
                if any((h.kept and h.call in kept) or h.acts & chosen for h in holders)
            )
            assert total >= curve[position]

    check()


def _every_choice(simulator: Simulator) -> list[tuple[Act, ...]]:
    sends = {send.call: send for send in simulator.sends()}
    runs = set(simulator.graph.runs(1))
    options: list[list[tuple[Act, ...]]] = []
    for call in simulator.graph.calls:
        here: list[tuple[Act, ...]] = [()]
        here += [((call.index, call.index),)] * ((call.index, call.index) in runs)
        here += [(sends[call.index],)] * (call.index in sends)
        options.append(here)
    return [tuple(act for part in parts for act in part) for parts in product(*options)]


def test_optimal_is_nearly_as_fast_as_the_best_of_all(chain: Chain) -> None:
    """On a chain, where runs are no better than single calls: every choice, each scheduled."""
    for rate in (3_000, 10_000, 40_000):
        profile = replace(chain(5), copy=_rates(rate, drag=0.02))
        simulator = Simulator(profile)
        choices = _every_choice(simulator)
        peak, low = simulator.peak_bytes([]), min(map(simulator.peak_bytes, choices))
        for share in (0.1, 0.3, 0.5, 0.8):
            budget = int(low + share * (peak - low))
            best = min(
                simulator.step_seconds(simulator.scheduled(acts, budget))
                for acts in choices
                if simulator.peak_bytes(acts) <= budget
            )
            found = choose_optimal(simulator, Request(budget, float("inf")))
            assert found is not None and simulator.peak_bytes(found.acts) <= budget
            assert simulator.step_seconds(found.acts) <= 1.03 * best, (rate, share)


def test_more_bandwidth_moves_more_and_costs_less(chain: Chain) -> None:
    profile = chain(12)
    peak = Simulator(profile).peak_bytes([])
    budget = int(0.6 * peak)
    seconds, moved = [], []
    for rate in (None, 1e3, 1e4, 1e5):
        copy = None if rate is None else _rates(rate, drag=0.01)
        plan = make_plan(replace(profile, copy=copy), Goal(budget_bytes=budget, techniques=BOTH))
        assert plan.predicted.peak_bytes <= budget
        seconds.append(plan.predicted.step_s)
        moved.append(plan.host_bytes)
    assert seconds == sorted(seconds, reverse=True)
    assert moved[0] == 0 and moved[-1] > 0
    assert "offload" in plan.techniques


def test_swap_moves_everything(chain: Chain) -> None:
    profile = replace(chain(6), copy=_rates(1e5))
    simulator = Simulator(profile)
    choice = choose_swap(simulator, Request(None, float("inf")))
    assert [calls_of(act)[0] for act in choice.acts] == list(range(6))
    assert simulator.host_bytes(choice.acts) == 6 * 1000 + 5 * 100 + 11 * 511
    assert simulator.peak_bytes(choice.acts) < simulator.peak_bytes([])


def test_host_memory_is_a_limit(chain: Chain) -> None:
    profile = replace(chain(8), copy=_rates(1e6))
    peak = Simulator(profile).peak_bytes([])
    goal = Goal(budget_bytes=int(0.7 * peak), techniques=BOTH)
    free = make_plan(profile, goal)
    assert free.host_bytes > 1500
    tight = make_plan(profile, replace(goal, host_bytes=1500))
    assert tight.host_bytes <= 1500
    assert tight.predicted.peak_bytes <= int(0.7 * peak)
    assert tight.predicted.step_s >= free.predicted.step_s
    with pytest.raises(InfeasibleError, match="on the host") as refusal:
        make_plan(profile, Goal(strategy="swap", techniques=BOTH, host_bytes=1500))
    assert "--host-budget" in str(refusal.value)


def test_a_host_budget_that_stands_in_the_way_is_named(chain: Chain) -> None:
    profile = replace(chain(8), copy=_rates(1e6))
    peak = Simulator(profile).peak_bytes([])
    goal = Goal(budget_bytes=int(0.7 * peak), techniques=("offload",))
    needed = make_plan(profile, goal).host_bytes
    with pytest.raises(InfeasibleError, match="The host budget is too small") as refusal:
        make_plan(profile, replace(goal, host_bytes=needed // 4))
    found = re.search(r"give --host-budget (\d+)", str(refusal.value))
    assert found is not None
    make_plan(profile, replace(goal, host_bytes=int(found[1])))
    with pytest.raises(InfeasibleError) as refusal:  # no host memory helps here
        make_plan(profile, replace(goal, budget_bytes=100, host_bytes=needed // 4))
    assert "host" not in str(refusal.value)


def test_points_survive_in_the_plan(chain: Chain) -> None:
    profile = replace(chain(6), copy=_rates(1e4))
    plan = make_plan(profile, Goal(strategy="swap", techniques=BOTH))
    simulator = Simulator(profile)
    acts: Sequence[Act] = read_acts(simulator, plan)
    assert simulator.peak_bytes(acts) == plan.predicted.peak_bytes
    assert simulator.step_seconds(acts) == pytest.approx(plan.predicted.step_s)
    assert all(s.decision == "offload" and s.release is not None for s in plan.segments)
    resident = plan.resident()
    assert resident.host_bytes == 0 and resident.offloaded_bytes == 0
    assert all(s.release is None for s in resident.segments)
