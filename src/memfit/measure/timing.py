"""Seconds: of steps, interleaved so that drift hits all alike, with medians and spreads."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from memfit.measure.turns import alone

STEADY = 0.005  # times that lie so near to each other, as a share of them, are certain enough
SHORT_S = 0.5  # a work below this is timed behind one of its own kind
# For how long the device is kept busy, at 1 to 2 a nanosecond: longer when that was too short.
_BUSY_CYCLES = (2_000_000, 20_000_000)
_HOST_WARMUP, _HOST_ROUNDS = 3, 5


@dataclass(frozen=True)
class Timing:
    """Median seconds of a step and the spread: half the distance between the quartiles."""

    median_s: float
    spread_s: float
    samples: tuple[float, ...]


class Clock:
    """Takes moments on the device's own timeline; `seconds` between two of them."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.device = device

    @property
    def runs_behind(self) -> bool:
        """Whether the device does what is asked of it while the host goes on."""
        return self._cuda

    def now(self) -> Any:
        """The moment the device reaches what was asked of it so far."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        """Seconds between two moments; the device must have passed both (see `settle`)."""
        return float(start.elapsed_time(stop)) / 1e3 if self._cuda else float(stop - start)

    def settle(self) -> None:
        """Wait until the device has done everything asked of it."""
        if self._cuda:
            torch.cuda.synchronize(self.device)

    def seconds_behind(self, work: Callable[[], Any]) -> float:
        """Seconds that `work` takes a device that has not begun it when the host is through.

        Short kernels are timed with their launches otherwise. `work` may be run more than once.
        """
        for cycles in _BUSY_CYCLES if self._cuda else (0,):
            self.settle()
            if self._cuda:
                torch.cuda._sleep(cycles)
            start = self.now()
            work()
            behind = self._cuda and not start.query()
            stop = self.now()
            self.settle()
            if behind:
                break
        return self.seconds(start, stop)


@dataclass(frozen=True)
class Inside:
    """A work that runs inside a context; to enter and leave it is not part of its seconds."""

    around: Callable[[], AbstractContextManager[Any]]
    work: Callable[[], Any]

    def __call__(self) -> None:
        """Enter the context, work, leave it."""
        with self.around():
            self.work()


@alone()
def time_interleaved(
    works: Mapping[str, Callable[[], Any]],
    device: torch.device,
    *,
    rounds: int,
    warmup: int = 1,
    limit_s: float = 60.0,
    steady: float = 0.0,
    most_rounds: int = 0,
    enough_s: float = 0.0,
) -> dict[str, Timing]:
    """Time each work once a round, in turn, in three rounds or more, every other one backwards.

    What one leaves behind, such as free memory in pieces, is then not always met by the same next
    one. On a device that runs behind the host a short work is timed right behind another run of it,
    as steps of training follow each other: after another work the caches of the processor and of
    Python are cold, and a host that is ahead of the device in training would not be.
    Stop early after `limit_s`, and where the seconds of each work lie within the share `steady` of
    their median: more rounds would tell the same. Short works may have `most_rounds` of them, as
    long as less than `enough_s` seconds are spent.
    """
    clock = Clock(device)
    samples: dict[str, list[float]] = {name: [] for name in works}
    latest_s: dict[str, float] = {}
    begun = time.perf_counter()
    for number in range(warmup + max(rounds, most_rounds)):
        if number >= warmup + rounds and time.perf_counter() - begun > enough_s:
            break
        for name, work in list(works.items())[:: -1 if number % 2 else 1]:
            inside = work if isinstance(work, Inside) else Inside(nullcontext, work)
            with inside.around():
                clock.settle()
                if clock.runs_behind and latest_s.get(name, SHORT_S) < SHORT_S:
                    inside.work()
                start = clock.now()
                inside.work()
                stop = clock.now()
                clock.settle()
            latest_s[name] = clock.seconds(start, stop)
            if number >= warmup:
                samples[name].append(latest_s[name])
        if number < warmup + 2:
            continue
        if time.perf_counter() - begun > limit_s:
            break
        if steady and all(_within(steady, times) for times in samples.values()):
            break
    return {name: summarise(times) for name, times in samples.items()}


def ratio_by_rounds(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """How many times as long as the other one took: the median of all rounds' ratios.

    Both ran in each round, moments apart, so there is no drift in their ratio. The true median lies
    between the second and the third number in 19 of 20 cases (order statistics); with few rounds
    these are all of them.
    """
    ratios = sorted(a / b for a, b in zip(one, other, strict=True))
    outside = max(0, math.floor(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))) - 1)
    return statistics.median(ratios), ratios[outside], ratios[-1 - outside]


def _within(share: float, times: list[float]) -> bool:
    return max(times) - min(times) <= share * statistics.median(times)


def time_apart(
    works: Mapping[str, Callable[[], Any]],
    device: torch.device,
    between: Callable[[], None],
    **how: Any,
) -> dict[str, Timing]:
    """Time each work by itself, where one is in the way of the next; `between` them is called."""
    times: dict[str, Timing] = {}
    for name, work in works.items():
        between()
        times |= time_interleaved({name: work}, device, **how)
    between()
    return times


@alone()
def host_and_step_seconds(step: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """How long the host takes to launch a step, and how long the step takes."""
    clock = Clock(device)
    host_s, step_s = [], []
    for _ in range(_HOST_WARMUP + _HOST_ROUNDS):
        clock.settle()
        start = time.perf_counter()
        step()
        host_s.append(time.perf_counter() - start)
        clock.settle()
        step_s.append(time.perf_counter() - start)
    return statistics.median(host_s[_HOST_WARMUP:]), statistics.median(step_s[_HOST_WARMUP:])


def summarise(samples: list[float]) -> Timing:
    """Median and spread of the samples."""
    if len(samples) < 2:
        return Timing(samples[0], 0.0, tuple(samples))
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(statistics.median(samples), (high - low) / 2, tuple(samples))
