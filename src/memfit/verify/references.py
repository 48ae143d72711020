"""What the step takes without memfit: as it is, and compiled whole, timed beside the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from memfit.errors import UsageError
from memfit.ir.result import ReferenceResult
from memfit.measure.memory import Peak, measure_peak
from memfit.measure.ran_out import first_words
from memfit.measure.step import (
    drop_gradients,
    is_out_of_memory,
    run_first_steps,
    run_step,
    untouched,
)
from memfit.measure.timing import Inside, Timing, time_apart, time_interleaved
from memfit.runtime.apply import Applied
from memfit.runtime.compile.whole import compiled_whole
from memfit.workload import Workload

EAGER, COMPILED = "eager", "compiled"
REFERENCES = (EAGER, COMPILED)
PLANNED = "planned"
References = dict[str, ReferenceResult | None]


def check_references(names: Sequence[str]) -> None:
    """Refuse a reference that there is not."""
    for name in names:
        if name not in REFERENCES:
            raise UsageError(
                f"unknown reference {name!r}", hint=f"there are: {', '.join(REFERENCES)}"
            )


def measure_references(
    workload: Workload,
    part: Workload,
    planned: Applied,
    names: Sequence[str],
    *,
    steps: int,
    accumulate: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> References | None:
    """Peaks and seconds of these steps, timed in turn with the planned one; None for no names.

    The plan runs `part`, the workload or one part of its batch. A step that cannot be run, for want
    of memory or of a compiler, has the reason in its place. The workload is left as it was.
    """
    check_references(names)
    if not names:
        return None
    peaks: dict[str, Peak] = {}
    why_not: dict[str, str] = {}
    kinds = {EAGER: lambda: workload, COMPILED: lambda: compiled_whole(workload)}
    systems = {name: kinds[name]() for name in REFERENCES if name in names}
    with untouched(workload):
        for name, system in systems.items():
            say(f"measuring the {name} step")
            found = _peak(system, accumulate)
            if isinstance(found, str):
                why_not[name] = found
            else:
                peaks[name] = found
        works = {n: partial(run_step, systems[n], accumulate=accumulate) for n in peaks}
        times = _times(works, workload, part, planned, steps, accumulate) if works else {}
    eager = times.get(EAGER)
    found_of = {name: _result(name, peaks, times, eager) for name in peaks}
    found_of |= {name: ReferenceResult(why_not=why) for name, why in why_not.items()}
    return {name: found_of.get(name) for name in REFERENCES}


def _peak(system: Workload, accumulate: int) -> Peak | str:
    """The peak of two steps, or why there are none."""
    try:
        run_first_steps(system, 3, accumulate=accumulate)
        if system.device.type == "cuda":
            torch.cuda.synchronize(system.device)
            torch.cuda.empty_cache()
        return measure_peak(system, partial(_two_steps, system, accumulate))
    except RuntimeError as error:  # dynamo's are, too
        from memfit.runtime.compile.dynamo_words import innermost  # loads torch's compiler

        drop_gradients(system)
        if is_out_of_memory(error):
            return f"out of memory: {first_words(error)}"
        inner = innermost(error)
        lines = [line.strip() for line in str(inner).splitlines()]
        return next((line for line in lines if line), type(inner).__name__)


def _two_steps(system: Workload, accumulate: int) -> None:
    for _ in range(2):
        run_step(system, accumulate=accumulate)


def _times(
    references: dict[str, partial[torch.Tensor]],
    workload: Workload,
    part: Workload,
    planned: Applied,
    steps: int,
    accumulate: int,
) -> dict[str, Timing]:
    """Seconds of all of them and of the plan, in turn where one does not disturb the next."""
    work = partial(run_step, part, accumulate=accumulate * planned.plan.split)
    works = {PLANNED: Inside(lambda: planned, work)}
    works |= {name: Inside(nullcontext, step) for name, step in references.items()}
    if planned.plan.trim or planned.plan.cuda_graphs:
        how = {"rounds": steps, "warmup": 3, "limit_s": 20}
        return time_apart(works, workload.device, planned.release, **how)
    return time_interleaved(works, workload.device, rounds=steps, warmup=3, limit_s=20)


def _result(
    name: str, peaks: dict[str, Peak], times: dict[str, Timing], eager: Timing | None
) -> ReferenceResult:
    peak, timing = peaks[name], times[name]
    beside = eager is not None and name != EAGER
    return ReferenceResult(
        peak_bytes=peak.bytes,
        peak_reserved_bytes=peak.reserved_bytes,
        step_s=timing.median_s,
        step_s_spread=timing.spread_s,
        planned_ratio=times[PLANNED].median_s / timing.median_s,
        eager_ratio=timing.median_s / eager.median_s if beside and eager is not None else None,
    )
