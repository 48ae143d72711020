"""Seconds of a step: whole, call by call, and what repeating a call costs the device and the host.

A GPU runs behind the Python that feeds it. Recomputing a call costs the device its kernels and the
host its launches; the step gets longer by whichever is short. Both are measured here.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.discover import dropped_saved_tensors
from memfit.capture.recording import recompute_all, route_of, segment_modules
from memfit.capture.segments import Segment
from memfit.ir.profile import CallTime
from memfit.ir.step_graph import StepGraph
from memfit.measure.call_times import CallClock, medians
from memfit.measure.memory import Peak, measure_peak
from memfit.measure.step import is_out_of_memory, run_step
from memfit.measure.timing import Clock, time_interleaved
from memfit.runtime.calls import Forward, Router, routed
from memfit.runtime.random_state import RandomState
from memfit.runtime.recompute import Recompute, frozen_statistics, statistics_norms
from memfit.workload import Workload

log = logging.getLogger(__name__)
PROBES = 3


@dataclass(frozen=True)
class Seconds:
    """Per call, of the plain step, and how long the host idles in it."""

    calls: tuple[CallTime, ...]
    step_s: float
    host_slack_s: float
    trim_s: float


def recomputing_all(
    workload: Workload, segments: Sequence[Segment], *, trim: bool = False, every: int = 1
) -> AbstractContextManager[Router]:
    """Run the workload with every segment worth it recomputed, or every second one."""
    engine = recompute_all(workload, segments, trim=trim, every=every)
    return routed(workload.model, route_of(segments), engine)


class StepTimes:
    """Times the plain step and the fully recomputed one, whole and call by call."""

    def __init__(
        self,
        workload: Workload,
        segments: Sequence[Segment],
        graph: StepGraph,
        accumulate: int,
    ) -> None:
        self.workload, self.segments, self.graph = workload, segments, graph
        self.accumulate = accumulate
        self.clock = Clock(workload.device)
        self.plain_peak: Peak | None = None

    def measure(self, rounds: int) -> Seconds:
        """Measure the plain step's peak if it fits, then all seconds, interleaved."""
        self.plain_peak = self._peak_of_plain()
        works = {"recomputed": self._recomputed_step}
        if self.plain_peak is not None:
            works = {"plain": self._plain_step, **works}
            if self.workload.device.type == "cuda":
                works["half"] = self._half_step
        timings = time_interleaved(works, self.workload.device, rounds=rounds, limit_s=30)
        whole = {name: timing.median_s for name, timing in timings.items()}
        if self.workload.device.type == "cuda":
            # By itself: pages given back in one step are missed in the next.
            works = {"trimmed": self._trimmed_step}
            trimmed = time_interleaved(works, self.workload.device, rounds=3, warmup=2)
            whole["trimmed"] = trimmed["trimmed"].median_s
        plain, recomputed = [], []
        for _ in range(min(3, rounds)):
            if self.plain_peak is not None:
                plain.append(self._calls(False))
            recomputed.append(self._calls(True))
        return self._seconds(whole, plain, recomputed)

    def _seconds(
        self,
        whole: dict[str, float],
        plain: list[dict[str, dict[int, float]]],
        recomputed: list[dict[str, dict[int, float]]],
    ) -> Seconds:
        alike = [call.alike for call in self.graph.calls]
        forward = medians([r["forward"] for r in plain or recomputed], alike)
        backward = medians([r["backward"] for r in plain or recomputed], alike)
        replay = medians([r["replay"] for r in recomputed], alike)
        host = medians([r["host"] for r in recomputed], alike)
        device = self._probe(replay, forward)
        if not plain:
            backward = [max(b - r, 0.0) for b, r in zip(backward, replay, strict=True)]
        replayed = [i for i, seconds in enumerate(replay) if seconds > 0]
        device_s, host_s = sum(device[i] for i in replayed), sum(host[i] for i in replayed)
        half = replayed[::2]
        half_load = (sum(device[i] for i in half), sum(host[i] for i in half))
        host = [h or d for h, d in zip(host, device, strict=True)]
        if self.workload.device.type != "cuda":
            host = device = [d * self._stretch(whole, device_s) for d in device]
            slack_s, step_s = 0.0, whole.get("plain", 0.0)
        elif "plain" in whole:
            factors = calibrate(
                Load(*half_load, self._extra(whole, "half")),
                Load(device_s, host_s, self._extra(whole, "recomputed")),
            )
            device = [d * factors[0] for d in device]
            host = [h * factors[1] for h in host]
            slack_s = factors[2]
            step_s = whole["plain"]
        else:
            slack_s = max(host_s - device_s, 0.0)
            step_s = max(whole["recomputed"] - self.accumulate * device_s, 1e-9)
        times = zip(forward, backward, device, host, strict=True)
        calls = tuple(CallTime(f, b, max(d, 1e-9), max(h, 1e-9)) for f, b, d, h in times)
        trim_s = max(whole.get("trimmed", 0.0) - whole["recomputed"], 0.0)
        return Seconds(calls, step_s, self.accumulate * slack_s, trim_s)

    def _stretch(self, whole: dict[str, float], replayed_s: float) -> float:
        """How much more all replays cost the step than their own time."""
        if replayed_s <= 0:
            return 1.0
        return min(max(self._extra(whole, "recomputed") / replayed_s, 0.5), 4.0)

    def _extra(self, whole: dict[str, float], name: str) -> float:
        """Seconds that a kind of step takes longer than the plain one, per micro-batch."""
        return (whole[name] - whole["plain"]) / self.accumulate

    def _probe(self, replay: list[float], forward: list[float]) -> list[float]:
        """Seconds the device needs to repeat each call, without waiting for the host."""
        usual = [r or f for r, f in zip(replay, forward, strict=True)]
        if self.workload.device.type != "cuda":
            return usual
        wanted = {c.alike for c in self.graph.calls if c.pinned is None}
        engine = _Probe(self.clock, wanted, segment_modules(self.workload.model, self.segments))
        with routed(self.workload.model, route_of(self.segments), engine):
            with dropped_saved_tensors(lambda tensor: None):
                self.workload.compute_loss()
        return [
            engine.seconds.get(call.alike, seconds)
            for call, seconds in zip(self.graph.calls, usual, strict=True)
        ]

    def _peak_of_plain(self) -> Peak | None:
        try:
            return measure_peak(self.workload, self._plain_step)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        log.info("the plain step does not fit on the device: it will be simulated")
        torch.cuda.empty_cache()
        return None

    def _plain_step(self) -> None:
        run_step(self.workload, accumulate=self.accumulate)

    def _recomputed_step(self) -> None:
        with recomputing_all(self.workload, self.segments):
            run_step(self.workload, accumulate=self.accumulate)

    def _half_step(self) -> None:
        with recomputing_all(self.workload, self.segments, every=2):
            run_step(self.workload, accumulate=self.accumulate)

    def _trimmed_step(self) -> None:
        with recomputing_all(self.workload, self.segments, trim=True):
            run_step(self.workload, accumulate=self.accumulate)

    def _calls(self, recompute: bool) -> dict[str, dict[int, float]]:
        calls = CallClock(self.clock)
        inner = recompute_all(self.workload, self.segments, _ReplayClock(calls))
        engine = _Timed(calls, inner if recompute else None)
        with ExitStack() as stack:
            stack.enter_context(routed(self.workload.model, route_of(self.segments), engine))

            def phase(name: str) -> None:
                if name == "optimizer":
                    calls.end = self.clock.now()

            run_step(self.workload, phase=phase)
        self.clock.settle()
        return calls.read()


@dataclass(frozen=True)
class Load:
    """What replaying some of the calls takes by itself, and what it was seen to add to the step."""

    device_s: float
    host_s: float
    extra_s: float


def calibrate(half: Load, all_: Load) -> tuple[float, float, float]:
    """Fit the costs of replays to what half of them and all of them add to the step.

    A step gets longer by max(device factor x device seconds, host factor x host seconds - slack):
    the slack is what the host has to spare in the plain step. Returns both factors and the slack.
    """
    device = min(max(all_.extra_s / all_.device_s, 0.5), 1.0) if all_.device_s > 0 else 1.0
    more_host_s = all_.host_s - half.host_s
    if more_host_s <= 0:
        return device, 1.0, all_.host_s
    host = min(max((all_.extra_s - half.extra_s) / more_host_s, 0.25), 4.0)
    return device, host, max(host * all_.host_s - all_.extra_s, 0.0)


class _Timed:
    """An engine that times each call's forward around another engine."""

    def __init__(self, calls: CallClock, inner: Recompute | None) -> None:
        self.calls, self.inner = calls, inner

    @property
    def replaying(self) -> bool:
        return self.inner is not None and self.inner.replaying

    def begin(self) -> None:
        if self.inner is not None:
            self.inner.begin()

    def end(self) -> None: ...

    def __call__(self, index: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        start = self.calls.clock.now()
        if self.inner is None:
            output = forward(*args, **kwargs)
        else:
            output = self.inner(index, forward, args, kwargs)
        self.calls.forward[index] = (start, self.calls.clock.now())
        self.calls.watch_backward(index, output)
        return output


class _ReplayClock:
    """Notes when replays begin and end, for the device and for the host."""

    def __init__(self, calls: CallClock) -> None:
        self.calls = calls
        self._start: Any = None
        self._host = 0.0

    def replay_begins(self, run: tuple[int, int]) -> None:
        self._start, self._host = self.calls.clock.now(), time.perf_counter()

    def replay_ends(self, run: tuple[int, int]) -> None:
        self.calls.replay[run[0]] = (self._start, self.calls.clock.now())
        self.calls.host[run[0]] = time.perf_counter() - self._host

    def replay_enters(self, index: int) -> None: ...

    def replay_exits(self, index: int) -> None: ...

    def run_is_done(self, run: tuple[int, int]) -> None: ...

    def run_saved(self, run: tuple[int, int], holders: list[Any]) -> None: ...

    def bookkeeping(self, index: int, begins: bool) -> None: ...


class _Probe:
    """An engine that repeats each wanted call on a device that is kept waiting beforehand."""

    replaying = False

    def __init__(self, clock: Clock, wanted: set[int], modules: dict[int, torch.nn.Module]) -> None:
        self.clock, self.wanted, self.modules = clock, wanted, modules
        self.seconds: dict[int, float] = {}

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def __call__(self, index: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        if index in self.wanted:
            state = RandomState.of([self.clock.device])
            norms = statistics_norms(self.modules[index])
            samples = []
            for _ in range(PROBES):
                with state.replayed(), frozen_statistics(norms):
                    self.clock.settle()
                    self.clock.occupy()
                    start = self.clock.now()
                    forward(*args, **kwargs)
                    stop = self.clock.now()
                self.clock.settle()
                samples.append(self.clock.seconds(start, stop))
            self.seconds[index] = statistics.median(samples)
        return forward(*args, **kwargs)
