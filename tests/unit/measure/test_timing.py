"""Timing by turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch

from memfit.measure.call_times import CallClock, medians
from memfit.measure.timing import (
    SHORT_S,
    Clock,
    Inside,
    ratio_by_rounds,
    summarise,
    time_interleaved,
)

CPU = torch.device("cpu")


def test_works_take_turns_and_warm_up_is_not_counted() -> None:
    order: list[str] = []
    works = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = time_interleaved(works, CPU, rounds=3, warmup=2)
    assert order == [*"ab", *"ba", *"ab", *"ba", *"ab"]
    assert {name: len(t.samples) for name, t in times.items()} == {"a": 3, "b": 3}


def test_the_slower_work_takes_longer() -> None:
    works = {"long": lambda: time.sleep(0.02), "short": lambda: time.sleep(0.001)}
    times = time_interleaved(works, CPU, rounds=5)
    assert times["long"].median_s > 5 * times["short"].median_s
    assert times["long"].median_s >= 0.02


def test_entering_and_leaving_a_context_is_not_timed() -> None:
    order: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        order.append("in")
        time.sleep(0.05)
        yield
        time.sleep(0.05)
        order.append("out")

    work = Inside(around, lambda: order.append("work"))
    timing = time_interleaved({"a": work}, CPU, rounds=2, warmup=0)["a"]
    work()
    assert order == ["in", "work", "out"] * 3
    assert max(timing.samples) < 0.05


def test_behind_the_host_a_short_work_is_timed_after_one_of_its_own_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Clock, "runs_behind", True)
    latest = ""

    def switching(name: str, seconds: float) -> Callable[[], None]:
        def work() -> None:
            nonlocal latest
            time.sleep(seconds if latest == name else seconds + 0.02)
            latest = name

        return work

    works = {"a": switching("a", 0.002), "b": switching("b", 0.001)}
    times = time_interleaved(works, CPU, rounds=3)
    assert all(timing.median_s < 0.02 for timing in times.values())
    order: list[str] = []
    long = {name: partial(_slept, order, name) for name in "ab"}
    time_interleaved(long, CPU, rounds=3, limit_s=0.0)
    assert order == [*"ab", *"ba", *"ab", *"ba"]  # a long one is not run once more
    order.clear()
    work = Inside(nullcontext, lambda: order.append("work"))
    time_interleaved({"a": work}, CPU, rounds=2, warmup=0)
    assert len(order) == 3  # once known to be short


def _slept(order: list[str], name: str) -> None:
    order.append(name)
    time.sleep(SHORT_S)


def test_a_limit_stops_after_three_rounds() -> None:
    rounds = time_interleaved({"a": lambda: time.sleep(0.002)}, CPU, rounds=50, limit_s=0.0)
    assert len(rounds["a"].samples) == 3


def test_times_that_do_not_vary_are_not_taken_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("memfit.measure.timing.time.perf_counter", lambda: now)

    def taking(*seconds: float) -> Callable[[], None]:
        left = iter(seconds)

        def work() -> None:
            nonlocal now
            now += next(left)

        return work

    works = {"a": taking(9.0, 1.0, 1.004, 1.002, 1.0), "b": taking(9.0, 2.0, 2.0, 2.0)}
    steady = time_interleaved(works, CPU, rounds=7, steady=0.005)
    assert [t.median_s for t in steady.values()] == pytest.approx([1.002, 2.0])
    assert {len(t.samples) for t in steady.values()} == {3}
    works = {"a": taking(9.0, 1.0, 1.006, 1.0, 1.0), "b": taking(9.0, 2.0, 2.0, 2.0, 2.0)}
    varying = time_interleaved(works, CPU, rounds=4, steady=0.005)
    assert {len(t.samples) for t in varying.values()} == {4}


def test_short_works_have_more_rounds_until_it_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("memfit.measure.timing.time.perf_counter", lambda: now)

    def rounds_of(seconds: float) -> int:
        def work() -> None:
            nonlocal now
            now += seconds

        more = {"most_rounds": 50, "enough_s": 8.0, "limit_s": float("inf")}
        return len(time_interleaved({"a": work}, CPU, rounds=10, **more)["a"].samples)

    assert [rounds_of(s) for s in (0.01, 0.5, 3.0)] == [50, 16, 10]


def test_ratios_by_rounds_have_no_drift_in_them() -> None:
    generator = torch.Generator().manual_seed(0)
    drift = torch.linspace(1, 3, 100, dtype=torch.float64)
    noise = 1 + 0.02 * torch.randn(100, generator=generator, dtype=torch.float64)
    ratio, low, high = ratio_by_rounds((1.1 * drift * noise).tolist(), drift.tolist())
    assert low < 1.1 < high and 1.09 < ratio < 1.11
    assert 0.005 < high - low < 0.02
    assert ratio_by_rounds([3.0, 2.0, 4.0], [2.0, 2.0, 2.0]) == (1.5, 1.0, 2.0)
    with pytest.raises(ValueError, match="zip"):
        ratio_by_rounds([1.0], [1.0, 2.0])


def test_median_and_spread() -> None:
    timing = summarise([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (timing.median_s, timing.spread_s) == (3.0, 1.0)
    assert timing.samples == (5.0, 1.0, 3.0, 2.0, 4.0)
    assert summarise([2.0]).spread_s == 0.0


def test_medians_are_shared_by_calls_that_are_alike() -> None:
    readings = [{0: 1.0, 1: 5.0, 2: 7.0}, {0: 3.0, 1: 9.0}]
    assert medians(readings, [0, 1, 1, 3]) == [2.0, 7.0, 7.0, 0.0]


def test_a_call_clock_reads_forward_replay_and_backward() -> None:
    calls = CallClock(Clock(CPU))
    x = torch.ones(2, requires_grad=True)
    first = x * 2
    calls.watch_backward(0, {"hidden": first, "n": 1})
    second = first * 3
    calls.watch_backward(1, second)
    calls.forward[0] = (1.0, 1.5)
    calls.replay[1] = (2.0, 2.25)
    second.sum().backward()
    calls.phase_begins("optimizer")
    read = calls.read()
    assert read["forward"] == {0: 0.5}
    assert read["replay"] == {1: pytest.approx(0.25)}
    assert list(read["backward"]) == [1, 0], "the last call's gradient arrives first"
    assert all(seconds >= 0 for seconds in read["backward"].values())


def test_a_call_clock_reads_what_lies_between_calls() -> None:
    """Nobody timed the loss and the optimizer."""
    calls = CallClock(Clock(CPU))
    calls.forward = {0: (1.0, 2.0), 1: (2.5, 4.0)}
    calls.begun = {"forward": 0.5, "backward": 6.0, "optimizer": 12.0, "end": 20.0}
    calls.backward = [(1, 7.0), (0, 9.0)]
    assert calls.read()["between"] == {0: 1.0, 1: 2.0, 2: 1.0, 3: 8.0}
    assert calls.read()["backward"] == {1: 2.0, 0: 3.0}


def test_a_device_that_was_not_kept_busy_long_enough_is_kept_busy_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[int] = []

    class Event:
        """Reached by the device at once when it was kept busy but shortly."""

        def __init__(self, enable_timing: bool) -> None:
            self.busy = slept[-1]

        def record(self) -> None: ...

        def query(self) -> bool:
            return self.busy == slept[0]

        def elapsed_time(self, stop: Event) -> float:
            return stop.busy / 1e6

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    works: list[int] = []
    seconds = Clock(torch.device("cuda")).seconds_behind(lambda: works.append(1))
    assert len(slept) == len(works) == 2
    assert slept[1] > slept[0]
    assert seconds == slept[1] / 1e9


def test_on_the_cpu_work_is_timed_once() -> None:
    works: list[int] = []

    def work() -> None:
        works.append(1)
        time.sleep(0.01)

    assert Clock(CPU).seconds_behind(work) >= 0.01
    assert works == [1]
