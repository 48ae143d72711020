"""Seconds of a step: whole, call by call, and what repeating a call costs the device and the host.

A GPU runs behind the Python that feeds it. Recomputing a call costs the device its kernels and the
host its launches; the step gets longer by whichever is short. Both are measured here.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from memfit.capture.captured import Captured
from memfit.capture.discover import dropped_saved_tensors
from memfit.capture.recording import recompute_all
from memfit.capture.usual import LAUNCH_BOUND
from memfit.ir.profile import CallTime
from memfit.ir.step_graph import PHASES, StepGraph
from memfit.measure.call_times import CallClock, medians
from memfit.measure.memory import Peak, measure_peak
from memfit.measure.ran_out import Stages, ended_by
from memfit.measure.step import drop_gradients, explained_errors, is_out_of_memory, run_step
from memfit.measure.timing import (
    SHORT_S,
    STEADY,
    Clock,
    Inside,
    host_and_step_seconds,
    time_apart,
    time_interleaved,
)
from memfit.measure.turns import alone
from memfit.runtime.calls import Engine, Forward, Router, routed
from memfit.runtime.cuda_graphs import CudaGraphs
from memfit.runtime.random_state import RandomState
from memfit.runtime.recompute import Recompute, scratch_statistics, statistics_norms
from memfit.workload import Workload

log = logging.getLogger(__name__)
PROBES = 3
LEAD = 2  # short steps in a row, after which the host is far ahead of the device if it can be


@dataclass(frozen=True)
class Seconds:
    """Per call, of the plain step and between its calls, and how long the host idles in it."""

    calls: tuple[CallTime, ...]
    step_s: float
    host_slack_s: float
    trim_s: float
    between_s: dict[str, float]  # by PHASES


def recomputing_all(
    workload: Workload, captured: Captured, *, trim: bool = False, every: int = 1
) -> AbstractContextManager[Router]:
    """Run the workload with every segment worth it recomputed, or every second one."""
    engine = recompute_all(workload, captured, trim=trim, every=every)
    return routed(workload.model, captured.route, engine, captured.code)


class StepTimes:
    """Times the plain step and the fully recomputed one, whole and call by call."""

    def __init__(
        self,
        workload: Workload,
        captured: Captured,
        graph: StepGraph,
        accumulate: int,
        cuda_graphs: bool | None = False,
        looks_first: bool = False,
    ) -> None:
        """With `cuda_graphs` the step is launched as such; None: where the host holds it up.

        A step that `looks_first` at its gradients runs forward and backward twice.
        """
        self.workload, self.captured, self.graph = workload, captured, graph
        self.accumulate = accumulate
        self.passes = 2 * accumulate if looks_first else accumulate
        self.clock = Clock(workload.device)
        self.plain_peak: Peak | None = None
        self.no_plain: str | None = None  # how far it came, where it does not fit
        self.graphed_peak: Peak | None = None  # of the plain step, if it is launched as CUDA graphs
        self.no_graphs: str | None = None  # why it is not, where that was asked for
        self._wants_graphs = cuda_graphs
        self._graphs = CudaGraphs(workload.model)

    @alone()
    def measure(self, rounds: int) -> Seconds:
        """Measure the plain step's peak if it fits, then all seconds, interleaved."""
        self.plain_peak = self._peak_of_plain()
        self.graphed_peak = self._peak_of_graphs()
        works = {"recomputed": self._recomputed_step()}
        if self.plain_peak is not None:
            works = {"plain": self._plain_step(), **works}
            if self.workload.device.type == "cuda":
                works["half"] = self._recomputed_step(every=2)
        how: dict[str, Any] = {"rounds": rounds, "limit_s": 30, "steady": STEADY}
        if self.graphed_peak is None:
            timings = time_interleaved(works, self.workload.device, **how)
        else:  # two would have their memory at once
            between = self._graphs.release
            timings = time_apart(works, self.workload.device, between, warmup=3, **how)
        whole = {name: timing.median_s for name, timing in timings.items()}
        if self.workload.device.type == "cuda":
            # By itself: pages given back in one step are missed in the next.
            works = {"trimmed": self._recomputed_step(trim=True)}
            trimmed = time_interleaved(works, self.workload.device, rounds=3)
            whole["trimmed"] = trimmed["trimmed"].median_s
        plain, recomputed = [], []
        for _ in range(min(3, rounds)):
            if self.plain_peak is not None:
                plain.append(self._calls(False, whole["plain"]))
            recomputed.append(self._calls(True, whole["recomputed"]))
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
        if not plain:
            backward = [max(b - r, 0.0) for b, r in zip(backward, replay, strict=True)]
        device = self._probe(replay, forward)
        replayed = [i for i, seconds in enumerate(replay) if seconds > 0]
        step_s, factors = self._fit(whole, device, host, replayed)
        calls = tuple(
            CallTime(f, b, max(d * factors.device, 1e-9), max((h or d) * factors.host, 1e-9))
            for f, b, d, h in zip(forward, backward, device, host, strict=True)
        )
        trim_s = max(whole.get("trimmed", 0.0) - whole["recomputed"], 0.0)
        between = medians([r["between"] for r in plain or recomputed], range(len(PHASES)))
        between_s = dict(zip(PHASES, between, strict=True)) if any(between) else {}
        return Seconds(calls, step_s, self.passes * factors.slack_s, trim_s, between_s)

    def _fit(
        self,
        whole: dict[str, float],
        device: list[float],
        host: list[float],
        replayed: list[int],
    ) -> tuple[float, Factors]:
        """The plain step's seconds, and how replays add to them."""

        def load(calls: list[int], name: str) -> Load:
            extra_s = (whole[name] - whole["plain"]) / self.passes
            return Load(sum(device[i] for i in calls), sum(host[i] for i in calls), extra_s)

        device_s, host_s = sum(device[i] for i in replayed), sum(host[i] for i in replayed)
        if "plain" not in whole:
            step_s = max(whole["recomputed"] - self.passes * device_s, 1e-9)
            return step_s, Factors(1.0, 1.0, max(host_s - device_s, 0.0))
        if "half" in whole:
            half, everything = load(replayed[::2], "half"), load(replayed, "recomputed")
            factors = calibrate(half, everything)
            if self.graphed_peak is not None:  # the host has nothing to do with it
                factors = factors._replace(host=1.0, slack_s=host_s)
            return whole["plain"], factors
        # On the CPU device and host are one: only the whole can be stretched.
        extra_s = load(replayed, "recomputed").extra_s
        stretch = min(max(extra_s / device_s, 0.5), 4.0) if device_s > 0 else 1.0
        return whole["plain"], Factors(stretch, stretch, max(host_s - device_s, 0.0) * stretch)

    def _probe(self, replay: list[float], forward: list[float]) -> list[float]:
        """Seconds the device needs to repeat each call, without waiting for the host."""
        usual = [r or f for r, f in zip(replay, forward, strict=True)]
        if self.workload.device.type != "cuda":
            return usual
        wanted = {c.alike for c in self.graph.calls if c.pinned is None}
        engine = _Probe(self.clock, wanted, self.captured.modules(self.workload.model))
        with self._routed(engine):
            with dropped_saved_tensors(lambda tensor: None):
                self.workload.compute_loss()
        return [
            engine.seconds.get(call.alike, seconds)
            for call, seconds in zip(self.graph.calls, usual, strict=True)
        ]

    def _peak_of_plain(self) -> Peak | None:
        try:
            return measure_peak(self.workload, self._plain_step())
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            far = ended_by(error, self.workload, Stages()).words
            self.no_plain = f"the plain step does not fit on the device: it is simulated. {far}"
        # Only now, outside of the except block, is what the failed step held really free.
        drop_gradients(self.workload)
        torch.cuda.empty_cache()
        return None

    def _peak_of_graphs(self) -> Peak | None:
        """The plain step's peak as CUDA graphs; None where it is not launched as such."""
        if self._wants_graphs is False:
            return None
        self.no_graphs = self._why_no_graphs()
        if self.no_graphs is not None or self.plain_peak is None:
            return None
        if self._wants_graphs is None:
            with self._routed(Recompute([], {})):
                host_s, step_s = host_and_step_seconds(self._step, self.workload.device)
            if host_s < LAUNCH_BOUND * step_s:
                self.no_graphs = "the host is ahead of the device"
                return None
        torch.cuda.empty_cache()
        self.plain_peak = measure_peak(self.workload, self._plain_step())
        self.graphed_peak = self.plain_peak  # from here on steps are launched as graphs
        graphed = self._plain_step()
        for _ in range(2):
            graphed()
        peak = measure_peak(self.workload, graphed)
        self.no_graphs = self._graphs.refused or self._graphs.as_ever
        if self.no_graphs is not None:
            return None
        whole = replace(peak, bytes=peak.bytes + self._graphs.hidden_bytes)
        log.info(
            "as CUDA graphs the plain step takes %.0f MB instead of %.0f, %.0f in the graphs",
            *(size / 2**20 for size in (whole.bytes, self.plain_peak.bytes)),
            self._graphs.hidden_bytes / 2**20,
        )
        return whole

    def _why_no_graphs(self) -> str | None:
        if self.workload.device.type != "cuda":
            return "there are none on this device"
        if self.accumulate > 1:
            return "the optimizer steps after several batches"
        if self.graph.model_calls > 1:
            return "the step calls the model more than once"
        return "the plain step does not fit" if self.plain_peak is None else None

    def _routed(self, engine: Engine) -> AbstractContextManager[Router]:
        return routed(self.workload.model, self.captured.route, engine, self.captured.code)

    def _plain_step(self) -> Inside:
        return Inside(lambda: self._launched(self._routed(Recompute([], {}))), self._step)

    def _recomputed_step(self, *, trim: bool = False, **how: Any) -> Inside:
        def around() -> AbstractContextManager[Any]:
            routed = recomputing_all(self.workload, self.captured, trim=trim, **how)
            return routed if trim else self._launched(routed)

        return Inside(around, self._step)

    @contextmanager
    def _launched(self, routed: AbstractContextManager[Router]) -> Iterator[None]:
        """The step as graphs, if it is launched as such."""
        with routed as router, ExitStack() as stack:
            if self.graphed_peak is not None:
                stack.enter_context(self._graphs.at_work(router.skip_model))
            yield

    def _step(self) -> None:
        with explained_errors(self.workload):
            run_step(self.workload, accumulate=self.accumulate)

    def _calls(self, recompute: bool, step_s: float) -> dict[str, dict[int, float]]:
        """Seconds of each call in a step of so many, right behind others if it is short.

        On a device that has nothing to do when a step begins, its first calls take as long as the
        host takes to launch them: a forward would seem to give copies more time than it does.
        """
        calls = CallClock(self.clock)
        inner = recompute_all(self.workload, self.captured, _ReplayClock(calls))
        engine = _Timed(calls, inner if recompute else None)
        with ExitStack() as stack:
            stack.enter_context(self._routed(engine))

            for _ in range(LEAD if self.clock.runs_behind and step_s < SHORT_S else 0):
                run_step(self.workload)
            run_step(self.workload, phase=calls.phase_begins)
        self.clock.settle()
        return calls.read()


@dataclass(frozen=True)
class Load:
    """What replaying some of the calls takes by itself, and what it was seen to add to the step."""

    device_s: float
    host_s: float
    extra_s: float


class Factors(NamedTuple):
    """A step gets longer by max(device x device seconds, host x host seconds - slack)."""

    device: float
    host: float
    slack_s: float


def calibrate(half: Load, everything: Load) -> Factors:
    """Fit the costs of replays to what half of them and all of them add to the step.

    The slack is what the host has to spare in the plain step.
    """
    device = 1.0
    if everything.device_s > 0:
        device = min(max(everything.extra_s / everything.device_s, 0.5), 1.0)
    more_host_s = everything.host_s - half.host_s
    if more_host_s <= 0:
        return Factors(device, 1.0, everything.host_s)
    host = min(max((everything.extra_s - half.extra_s) / more_host_s, 0.25), 4.0)
    return Factors(device, host, max(host * everything.host_s - everything.extra_s, 0.0))


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

            def replayed() -> None:
                with state.replayed():
                    forward(*args, **kwargs)

            for _ in range(PROBES):
                with scratch_statistics(norms):
                    samples.append(self.clock.seconds_behind(replayed))
            self.seconds[index] = statistics.median(samples)
        return forward(*args, **kwargs)
