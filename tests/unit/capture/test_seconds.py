"""What replays cost a step: fitted to two measured loads, and predicted for any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from memfit.capture import profile as profiling
from memfit.capture import seconds
from memfit.capture.seconds import Factors, Load, calibrate
from memfit.ir.profile import CallTime, DeviceFacts, Profile
from memfit.ir.step_graph import Call, StepGraph
from memfit.measure.step import run_step
from memfit.measure.timing import Clock
from memfit.planning.simulate import Simulator

SECONDS = st.floats(0.001, 10.0)


def _extra_s(factors: Factors, load: Load) -> float:
    device, host, slack_s = factors
    return max(device * load.device_s, host * load.host_s - slack_s)


def _profile(times: list[tuple[float, float]], slack_s: float, accumulate: int) -> Profile:
    calls = tuple(
        Call(i, f"layers.{i}", 0, 1, "Block", False, 2 * i, -1, 2 * i + 1, -1, -1)
        for i in range(len(times))
    )
    end = 2 * len(times)
    return Profile(
        fingerprint="by hand",
        workload={},
        device=DeviceFacts("cuda", "test", 10**12, 10**12, "2.13.0"),
        graph=StepGraph(end + 1, end, end, end, {"parameters": 1}, calls, ()),
        call_times=tuple(CallTime(d, 2 * d, d, h) for d, h in times),
        step_s=10.0,
        host_slack_s=slack_s,
        accumulate=accumulate,
    )


# -- calibrate ------------------------------------------------------------------------------------


def test_device_bound_replays_cost_what_the_device_needs() -> None:
    half, all_ = Load(1.0, 0.5, 0.9), Load(2.0, 1.0, 1.8)
    factors = calibrate(half, all_)
    assert factors[0] == pytest.approx(0.9)
    assert _extra_s(factors, half) == pytest.approx(half.extra_s)
    assert _extra_s(factors, all_) == pytest.approx(all_.extra_s)


def test_device_bound_replays_hide_what_the_host_does_meanwhile() -> None:
    # Half the replays have far less than half of the launches: the host had time for them all.
    half, all_ = Load(1.0, 0.5, 1.0), Load(2.0, 4.5, 2.0)
    factors = calibrate(half, all_)
    assert factors == pytest.approx((1.0, 0.25, 0.0))
    assert _extra_s(factors, half) == pytest.approx(1.0)
    assert _extra_s(factors, all_) == pytest.approx(2.0)


def test_host_bound_replays_wait_until_the_slack_is_used_up() -> None:
    half, all_ = Load(0.4, 2.0, 1.0), Load(0.8, 4.0, 3.5)
    factors = calibrate(half, all_)
    assert factors == pytest.approx((1.0, 1.25, 1.5))
    assert _extra_s(factors, half) == pytest.approx(half.extra_s)
    assert _extra_s(factors, all_) == pytest.approx(all_.extra_s)
    a_few = Load(0.2, 1.0, 0.0)
    assert _extra_s(factors, a_few) == pytest.approx(0.2), "the host keeps up: the device counts"


@given(
    device=st.tuples(SECONDS, SECONDS),
    host=st.tuples(SECONDS, SECONDS),
    factor=st.floats(0.25, 4),
    slack_s=st.floats(0, 10),
)
def test_both_measured_points_come_back_when_in_range(
    device: tuple[float, float], host: tuple[float, float], factor: float, slack_s: float
) -> None:
    (half_device, all_device), (half_host, all_host) = sorted(device), sorted(host)
    assume(all_host - half_host > 1e-3)
    half = Load(half_device, half_host, factor * half_host - slack_s)
    all_ = Load(all_device, all_host, factor * all_host - slack_s)
    # In range: no step gets longer by less than its replays take on the device.
    assume(half.extra_s >= half.device_s and all_.extra_s >= all_.device_s)
    factors = calibrate(half, all_)
    assert factors[1] == pytest.approx(factor, rel=1e-6)
    assert factors[2] == pytest.approx(slack_s, rel=1e-6, abs=1e-6)
    assert _extra_s(factors, half) == pytest.approx(half.extra_s, rel=1e-6)
    assert _extra_s(factors, all_) == pytest.approx(all_.extra_s, rel=1e-6)


@pytest.mark.parametrize(
    ("half", "all_", "factors"),
    [
        pytest.param(Load(1, 1, 0.1), Load(2, 2, 0.5), (0.5, 0.4, 0.3), id="device at least half"),
        pytest.param(Load(1, 1, 2.0), Load(2, 2, 4.0), (1.0, 2.0, 0.0), id="device at most all"),
        pytest.param(Load(1, 1, 2.0), Load(2, 2, 2.0), (1.0, 0.25, 0.0), id="host at least 1/4"),
        pytest.param(Load(1, 1, 3.0), Load(2, 2, 1.0), (0.5, 0.25, 0.0), id="noise: all is less"),
        pytest.param(Load(1, 1, 0.0), Load(2, 2, 6.0), (1.0, 4.0, 2.0), id="host at most 4"),
        pytest.param(Load(1, 1, 3.0), Load(2, 2, 4.0), (1.0, 1.0, 0.0), id="no negative slack"),
        pytest.param(Load(1, 1, -0.2), Load(2, 2, -0.1), (0.5, 0.25, 0.6), id="noise: faster"),
    ],
)
def test_what_cannot_be_is_clamped(
    half: Load, all_: Load, factors: tuple[float, float, float]
) -> None:
    assert calibrate(half, all_) == pytest.approx(factors)


@given(
    half=st.builds(Load, SECONDS, SECONDS, st.floats(-10, 10)),
    all_=st.builds(Load, st.floats(0, 10), st.floats(0, 10), st.floats(-10, 10)),
)
def test_factors_and_slack_stay_in_their_bounds(half: Load, all_: Load) -> None:
    device, host, slack_s = calibrate(half, all_)
    assert 0.5 <= device <= 1
    assert 0.25 <= host <= 4
    assert slack_s >= 0


def test_nothing_to_replay_fits_no_factor() -> None:
    nothing = Load(0.0, 0.0, 0.0)
    assert calibrate(nothing, nothing) == (1.0, 1.0, 0.0)
    noise = Load(0.0, 0.0, 0.01)
    assert calibrate(noise, noise) == (1.0, 1.0, 0.0)


def test_one_replay_is_in_both_loads_and_the_host_is_taken_to_keep_up() -> None:
    one = Load(1.0, 3.0, 0.8)
    factors = calibrate(one, one)
    assert factors == pytest.approx((0.8, 1.0, 3.0))
    assert _extra_s(factors, one) == pytest.approx(0.8)


# -- the simulator's use of it --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runs", "extra_s"),
    [
        ([], 0.0),
        ([(0, 0)], 1.0),  # host 4 - slack 5: the device's second
        ([(0, 1)], 3.0),  # device 3, host 8 - 5
        ([(0, 0), (1, 2)], 7.0),  # host 12 - 5, device 3.5
    ],
)
def test_extra_seconds_are_the_devices_or_the_hosts_beyond_its_slack(
    runs: list[tuple[int, int]], extra_s: float
) -> None:
    simulator = Simulator(_profile([(1.0, 4.0), (2.0, 4.0), (0.5, 4.0)], 5.0, 1))
    assert simulator.extra_seconds(runs) == pytest.approx(extra_s)
    assert simulator.step_seconds(runs) == pytest.approx(10.0 + extra_s)


@given(
    times=st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=5),
    slack_s=st.floats(0, 20),
    accumulate=st.integers(1, 3),
    data=st.data(),
)
def test_extra_seconds_formula(
    times: list[tuple[float, float]], slack_s: float, accumulate: int, data: st.DataObject
) -> None:
    chosen = [i for i in range(len(times)) if data.draw(st.booleans())]
    device_s = accumulate * sum(times[i][0] for i in chosen)
    host_s = accumulate * sum(times[i][1] for i in chosen)
    simulator = Simulator(_profile(times, slack_s, accumulate))
    extra_s = simulator.extra_seconds([(i, i) for i in chosen])
    assert extra_s == pytest.approx(max(device_s, host_s - slack_s))


# -- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("behind", "short_s"), [(True, 10.0), (True, 0.0), (False, 10.0)])
def test_calls_of_short_steps_are_timed_in_a_row_of_them_where_the_device_runs_behind(
    zoo: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, behind: bool, short_s: float
) -> None:
    ran: list[bool] = []  # whether the phases of the step were watched

    def noted(*args: Any, **how: Any) -> torch.Tensor:
        ran.append("phase" in how)
        return run_step(*args, **how)

    monkeypatch.setattr(seconds, "run_step", noted)
    monkeypatch.setattr(seconds, "SHORT_S", short_s)
    monkeypatch.setattr(Clock, "runs_behind", behind)
    profile = profiling.profile_workload(zoo.workload(zoo.Stack), executor="module")
    row = [False, False, True] if behind and short_s else [True]
    watched = len(ran) - ran.index(True) + len(row) - 1
    assert ran[-watched:] == row * (watched // len(row)) and watched >= 2 * len(row)
    assert all(call.forward_s > 0 and call.backward_s > 0 for call in profile.call_times)
