"""Where the seconds of a step go: its phases, its segments, recomputing, copies.

The step is run as it is, plain or fitted, and left as it was. Each begins with an idle device and
is waited for, so nothing hides behind the step before: a loader that works ahead looks slower here
than it is to a loop that nobody waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from memfit.capture.find import find_segments
from memfit.errors import ModelError, UsageError
from memfit.fitted import Fitted
from memfit.ir.component_times import COMPONENTS, ComponentTimes, CopyTime, SegmentTime
from memfit.measure.step import drop_gradients, is_out_of_memory, untouched
from memfit.measure.timing import summarise
from memfit.measure.turns import alone
from memfit.observe.marks import OUTSIDE
from memfit.observe.timed_steps import TimedSteps, fitted_steps, plain_steps
from memfit.runtime.apply import Applied
from memfit.runtime.calls import Route
from memfit.runtime.cuda_graphs import CudaGraphs
from memfit.runtime.signature import describe
from memfit.workload import Workload

NOTHING = "nothing is recomputed"
BY_REPLAY = "timed where segments are repeated"
BY_DIFFERENCE = "a segment's backward, less that of the same segment with everything kept"
NOT_APART = "inside a segment not told from its backward"
IN_A_GRAPH = "not told from the backward"
LAUNCHED = (
    "forward and backward are launched as one CUDA graph each, which calls no segment: neither "
    "segments nor recomputing are told apart"
)
_UNTIL_LAUNCHED = 2  # steps: the first of its kind runs as ever, the second is captured


@alone()
def component_times(
    what: Workload | Fitted,
    loader: Iterable[Any] | None = None,
    *,
    steps: int = 10,
    warmup: int = 3,
    segments: Sequence[str] | None = None,
) -> ComponentTimes:
    """Time the components of `steps` steps of a workload, or of a fitted one, after a warm-up.

    Batches come from the `loader`, again from its start when it ends; without one the example
    batch is used and the loader's time is not known. `segments` names those of a plain workload.
    """
    if steps < 1 or warmup < 0:
        raise UsageError(
            f"steps is {steps} and warmup is {warmup}", hint="steps=10, warmup=3 for example"
        )
    if isinstance(what, Fitted):
        if segments is not None:
            raise UsageError("a fitted step has the segments of its plan", hint="leave them out")
        return _of_fitted(what, loader, steps, warmup)
    if not isinstance(what, Workload):
        raise UsageError(
            f"the components of a {type(what).__name__} cannot be timed",
            hint="give a memfit.Workload, or what memfit.fit returned",
        )
    return _of_workload(what, loader, steps, warmup, segments)


def _of_workload(
    workload: Workload,
    loader: Iterable[Any] | None,
    steps: int,
    warmup: int,
    patterns: Sequence[str] | None,
) -> ComponentTimes:
    with untouched(workload, as_it_is=True):
        found, _ = find_segments(workload, patterns, hidden=True)
        calls = [(s.visit.module, s.visit.number, s.visits) for s in found]
        timed = plain_steps(workload, loader, Route(calls))
        for number in range(warmup + steps):
            timed.run(counts=number >= warmup)
    repeats = timed.seconds("recompute") > 0
    names = [_name(module, number, visits) for module, number, visits in calls]
    return _times(timed, names, BY_REPLAY if repeats else NOTHING)


def _of_fitted(
    fitted: Fitted, loader: Iterable[Any] | None, steps: int, warmup: int
) -> ComponentTimes:
    applied = fitted.applied
    if not applied.at_work:
        raise UsageError(
            "the plan was taken off the model, so there is no fitted step to time",
            hint="fit again, or time the Workload",
        )
    if fitted.waiting:
        raise UsageError(
            f"the gradients of {fitted.waiting} batches wait for the optimizer",
            hint="call fitted.flush() first",
        )
    if applied.graphs is not None and applied.graphs.refused is None:
        times = _of_launched(fitted, applied.graphs, loader, steps, warmup)
        if times is not None:
            return times
    return _by_segments(fitted, loader, steps, warmup)


def _by_segments(
    fitted: Fitted, loader: Iterable[Any] | None, steps: int, warmup: int
) -> ComponentTimes:
    """Those of a step whose model is called, and its segments with it."""
    applied, plan = fitted.applied, fitted.plan
    timed = fitted_steps(fitted, loader)
    inside = [i for i, s in enumerate(plan.segments) if s.recomputed_bytes and s.run is None]
    kept = _everything_kept(fitted, timed) if inside else None
    applied.undo()
    try:
        with untouched(fitted.workload):
            copies, kept_fits = _in_turn(applied, timed, kept, steps, warmup)
    finally:
        applied.install()
    notes = []
    if "step_in_backward" in plan.setup:
        notes.append("the optimizer steps inside the backward, and is timed with it")
    if not kept_fits:
        notes.append("with everything kept the step does not fit on the device")
    ways = [BY_REPLAY] if plan.runs else []
    if inside and kept is not None and kept_fits:
        ways.append(BY_DIFFERENCE)
        _tell_apart(timed, kept, inside)
    elif inside:
        ways.append(NOT_APART)
    names = [segment.name for segment in plan.segments]
    return _times(timed, names, "; ".join(ways) or NOTHING, copies, notes)


def _of_launched(
    fitted: Fitted,
    graphs: CudaGraphs,
    loader: Iterable[Any] | None,
    steps: int,
    warmup: int,
) -> ComponentTimes | None:
    """Those of a step launched as CUDA graphs: its phases, for a launch calls no segment.

    Marks inside the model would be captured, or be left out when the graph is launched. None where
    it turns out that no step is launched: then there is more to be seen.
    """
    applied, plan = fitted.applied, fitted.plan
    timed = fitted_steps(fitted, loader, inside=False)
    warmup = max(warmup, _UNTIL_LAUNCHED)
    applied.undo()
    try:
        with untouched(fitted.workload), applied:
            for _ in range(warmup):
                timed.run(counts=False)
            before = graphs.replays
            for _ in range(steps):
                timed.run(counts=True)
            launched = graphs.replays - before
    finally:
        applied.install()
    if not launched or graphs.refused is not None:
        return None
    notes = [LAUNCHED]
    calls = steps * timed.batches_per_step * plan.split * plan.model_calls
    if launched < calls:
        why = "batches differ" if graphs.as_ever is None else graphs.as_ever
        notes.append(
            f"{calls - launched} of {calls} calls of the model were not launched ({why}), and what "
            "follows such a call is captured anew: the times are of all of these"
        )
    recomputes = plan.recomputed_bytes > 0
    return _times(timed, None, IN_A_GRAPH if recomputes else NOTHING, notes=notes)


def _everything_kept(fitted: Fitted, timed: TimedSteps) -> tuple[Applied, TimedSteps] | None:
    """The same step with nothing recomputed, by the same executor, to compare backwards with.

    None where a segment's backward does other things as well, so that a difference says nothing.
    """
    plan = fitted.plan
    waits = plan.host_bytes or "step_in_backward" in plan.setup
    if waits or plan.split > 1 or timed.batches_per_step > 1:
        return None
    # What could not be launched as CUDA graphs is compared with what is not, either.
    unplanned = Applied(replace(plan.unplanned(), cuda_graphs=False), fitted.workload.model)
    return unplanned, plain_steps(fitted.workload, timed.loader, timed.route)


def _in_turn(
    applied: Applied,
    timed: TimedSteps,
    kept: tuple[Applied, TimedSteps] | None,
    steps: int,
    warmup: int,
) -> tuple[CopyTime | None, bool]:
    """Run planned steps, and others beside them; what the planned ones copied, if all fitted."""
    before, fits = None, True
    for number in range(warmup + steps):
        with applied:
            assert applied.recompute is not None
            if applied.swap is not None and number == warmup:
                before = applied.swap.statistics()
            applied.recompute.observer = timed.marks
            try:
                timed.run(counts=number >= warmup)
            finally:
                applied.recompute.observer = None
        if kept is not None and fits:
            fits = _run_if_it_fits(*kept, counts=number >= warmup)
    if before is None or applied.swap is None:
        return None, fits
    return CopyTime.between(before, applied.swap.statistics(), steps), fits


def _run_if_it_fits(applied: Applied, timed: TimedSteps, *, counts: bool) -> bool:
    try:
        with applied:
            timed.run(counts=counts)
        return True
    except (RuntimeError, ModelError) as error:
        if not is_out_of_memory(error):
            raise
    # Only now, outside of the except block, is what the failed step held really free.
    drop_gradients(timed.workload)
    torch.cuda.empty_cache()
    return False


def _tell_apart(timed: TimedSteps, kept: tuple[Applied, TimedSteps], inside: list[int]) -> None:
    """Move what the backward of a segment takes longer than with everything kept to recompute."""
    for index in inside:
        extra_s = timed.seconds("backward", index) - kept[1].seconds("backward", index)
        for share in timed.shares:
            moved_s = min(max(extra_s, 0.0), share.get(("backward", index), 0.0))
            share["backward", index] = share.get(("backward", index), 0.0) - moved_s
            share["recompute", index] = share.get(("recompute", index), 0.0) + moved_s


def _times(
    timed: TimedSteps,
    names: Sequence[str] | None,
    recompute: str,
    copies: CopyTime | None = None,
    notes: Sequence[str] = (),
) -> ComponentTimes:
    """What was seen, with the segments of these `names`; None: they were not told apart."""
    unknown = {"loader"} if timed.loader is None else set()
    if recompute == IN_A_GRAPH:
        unknown.add("recompute")
    rows = [] if names is None else [*enumerate(names), (OUTSIDE, "")]
    segments = [
        SegmentTime(
            name,
            timed.seconds("forward", index),
            timed.seconds("backward", index),
            timed.seconds("recompute", index),
        )
        for index, name in rows
    ]
    return ComponentTimes(
        workload=describe(timed.workload),
        device=str(timed.workload.device),
        steps=len(timed.walls),
        step_s=timed.step_s(),
        step_spread_s=summarise(timed.walls).spread_s,
        components={c: timed.seconds(c) for c in COMPONENTS if c not in unknown},
        segments=tuple(segments),
        recompute=recompute,
        copies=copies,
        notes=tuple(notes),
    )


def _name(module: str, number: int, visits: int) -> str:
    return module if visits == 1 else f"{module}#{number}"
