"""Profile a workload: find its segments, record its step, time it, and leave it as it was."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.build import build_step_graph
from memfit.capture.find import find_segments
from memfit.capture.recording import (
    recompute_all,
    recomputed_alone,
    record_forward,
    record_step,
    route_of,
)
from memfit.capture.segments import Segment
from memfit.errors import DeviceMemoryError
from memfit.ir.profile import Baseline, CallTime, Profile
from memfit.ir.step_graph import StepGraph
from memfit.measure.call_times import CallClock, medians
from memfit.measure.cuda_allocator import allocator_start, settle_optimizer_state
from memfit.measure.device import device_facts
from memfit.measure.memory import Peak, measure_peak, static_bytes
from memfit.measure.step import explained_errors, is_out_of_memory, run_step, untouched
from memfit.measure.timing import Clock, time_interleaved
from memfit.runtime.calls import Forward, routed
from memfit.runtime.inplace import inplace_off
from memfit.runtime.recompute import Recompute
from memfit.runtime.signature import describe, model_signature
from memfit.workload import Workload

log = logging.getLogger(__name__)
Progress = Callable[[str], None]


def profile_workload(
    workload: Workload,
    *,
    segments: Sequence[str] | None = None,
    accumulate: int = 1,
    rounds: int = 5,
    progress: Progress | None = None,
) -> Profile:
    """Measure one step of the workload; its model, optimizer and RNG are as before afterwards."""
    say = progress or (lambda text: None)
    with untouched(workload):
        say("finding segments")
        found, inplace = find_segments(workload, segments)
        with inplace_off(workload.model, inplace):
            say("warming up")
            _warm_up(workload, found)
            settle_optimizer_state(workload.optimizer, workload.device)
            allocator = allocator_start(workload.device)
            static = static_bytes(workload)
            say("recording memory")
            graph = build_step_graph(
                record_forward(workload, found),
                record_step(workload, found),
                found,
                recomputed_alone(found),
                static,
            )
            say("timing segments")
            times = _Times(workload, found, graph, accumulate)
            times.run(rounds)
        peak = times.plain_peak
        call_times, step_s = times.result()
        notes = [f"{name}: in-place work switched off to recompute it" for name in inplace]
    return Profile(
        fingerprint=model_signature(workload.model),
        workload=describe(workload),
        device=device_facts(workload.device),
        graph=graph,
        call_times=call_times,
        step_s=step_s,
        baseline=None if peak is None else Baseline(peak.bytes, peak.reserved_bytes, step_s),
        allocator=allocator,
        inplace_off=inplace,
        accumulate=accumulate,
        notes=tuple(notes),
    )


def _warm_up(workload: Workload, segments: Sequence[Segment]) -> None:
    """Two steps with everything recomputed: optimizer state and library workspaces exist then."""
    try:
        with _engine(workload, segments), explained_errors(workload):
            for _ in range(2):
                run_step(workload)
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            "the step runs out of memory even with every segment recomputed: "
            + str(error).split(". ")[0],
            hint="use a smaller batch or sequence, bf16, or a smaller model",
        ) from error


def _engine(workload: Workload, segments: Sequence[Segment]) -> Any:
    return routed(workload.model, route_of(segments), recompute_all(workload, segments))


@dataclass
class _Reading:
    plain: dict[str, dict[int, float]] | None
    recomputed: dict[str, dict[int, float]]


class _Times:
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
        self.readings: list[_Reading] = []
        self.whole: dict[str, float] = {}

    def run(self, rounds: int) -> None:
        """Measure the plain step's peak if it fits, then all seconds, interleaved."""
        self.plain_peak = self._peak_of_plain()
        works = {"recomputed": self._recomputed_step}
        if self.plain_peak is not None:
            works = {"plain": self._plain_step} | works
        timings = time_interleaved(works, self.workload.device, rounds=rounds, limit_s=30)
        self.whole = {name: timing.median_s for name, timing in timings.items()}
        for _ in range(min(3, rounds)):
            plain = self._calls(False) if self.plain_peak is not None else None
            self.readings.append(_Reading(plain, self._calls(True)))

    def result(self) -> tuple[tuple[CallTime, ...], float]:
        """Seconds per call, and of the plain step."""
        alike = [call.alike for call in self.graph.calls]
        recomputed = [r.recomputed for r in self.readings]
        plain = [r.plain for r in self.readings if r.plain is not None]
        forward = medians([r["forward"] for r in plain or recomputed], alike)
        replay = medians([r["replay"] for r in recomputed], alike)
        backward = medians([r["backward"] for r in plain or recomputed], alike)
        again = [r or f for r, f in zip(replay, forward, strict=True)]
        replayed = sum(replay)
        if "plain" in self.whole and replayed > 0:
            # Replays also cost outside of themselves (Python, launches): share that out.
            extra = (self.whole["recomputed"] - self.whole["plain"]) / self.accumulate
            factor = min(max(extra / replayed, 0.5), 4.0)
            again = [seconds * factor for seconds in again]
            step_s = self.whole["plain"]
        else:
            step_s = max(self.whole["recomputed"] - self.accumulate * replayed, 1e-9)
        if not plain:
            backward = [max(b - r, 0.0) for b, r in zip(backward, replay, strict=True)]
        times = zip(forward, backward, again, strict=True)
        return tuple(CallTime(f, b, max(a, 1e-9)) for f, b, a in times), step_s

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
        with _engine(self.workload, self.segments):
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
    """Notes when replays begin and end."""

    def __init__(self, calls: CallClock) -> None:
        self.calls = calls
        self._start: Any = None

    def replay_begins(self, run: tuple[int, int]) -> None:
        self._start = self.calls.clock.now()

    def replay_ends(self, run: tuple[int, int]) -> None:
        self.calls.replay[run[0]] = (self._start, self.calls.clock.now())

    def replay_enters(self, index: int) -> None: ...

    def replay_exits(self, index: int) -> None: ...

    def run_is_done(self, run: tuple[int, int]) -> None: ...

    def bookkeeping(self, index: int, begins: bool) -> None: ...

    def run_saved(self, run: tuple[int, int], holders: list[Any]) -> None: ...
