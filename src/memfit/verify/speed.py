"""How much time does the plan cost? Planned and plain steps in turn, and plain against itself."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from memfit.measure.step import run_step, untouched
from memfit.measure.timing import Inside, Timing, time_apart, time_interleaved
from memfit.runtime.apply import Applied, release_all
from memfit.workload import Workload


@dataclass(frozen=True)
class Speed:
    """Seconds of the planned step and, where it fits, of the plain one, taken in one run."""

    planned: Timing
    plain: Timing | None = None
    plain_again: Timing | None = None

    @property
    def ratio(self) -> float | None:
        """Planned over plain."""
        return None if self.plain is None else self.planned.median_s / self.plain.median_s

    @property
    def same_code_ratio(self) -> float | None:
        """Plain over plain: what the clock makes of no difference at all."""
        if self.plain is None or self.plain_again is None:
            return None
        return self.plain_again.median_s / self.plain.median_s


def compare_speed(
    workload: Workload,
    planned: Applied,
    *,
    steps: int,
    whole: Workload | None = None,
    unplanned: Applied | None = None,
    accumulate: int = 1,
    baseline: bool = True,
) -> Speed:
    """Time `steps` steps of each kind, in turn, after three to warm up.

    `unplanned` runs the step by the plan's executor with everything kept; None: as its module does.
    The plan's workload may be a part of the `whole` batch, which the plain step sees at once.
    """

    parts = planned.plan.split
    plain_step = partial(run_step, whole or workload, accumulate=accumulate)
    plain = Inside(lambda: unplanned or nullcontext(), plain_step)
    with_plan = Inside(lambda: planned, partial(run_step, workload, accumulate=accumulate * parts))
    works = {"planned": with_plan}
    if baseline:
        works = {"plain": plain, "planned": with_plan, "plain again": plain}
    how: dict[str, Any] = {"rounds": steps, "warmup": 3, "limit_s": 20}
    with untouched(workload, unmeasured=True):
        # Pages that a trimming plan gives back are missed by the step after it, and CUDA graphs
        # keep the memory of both: not in turn then.
        if planned.plan.trim or planned.plan.cuda_graphs:
            release = partial(release_all, planned, unplanned)
            times = time_apart(works, workload.device, release, **how)
        else:
            times = time_interleaved(works, workload.device, **how)
    return Speed(times["planned"], times.get("plain"), times.get("plain again"))
