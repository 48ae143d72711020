"""How much larger a batch a plan allows at the same budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from memfit import api
from memfit.errors import DeviceMemoryError, HostMemoryError, InfeasibleError
from memfit.ir.batch_size import BatchSizes, PlannedBatch
from memfit.ir.result import Result
from memfit.train.batch_size.predict import STEP_BACK, Point, extrapolate
from memfit.units import format_bytes
from memfit.workload import Workload

Progress = Callable[[str], None]
MARGIN = 1.02  # the smallest budget of all leaves the machine nothing to differ in
MAX_FITS = 3
TOO_LARGE = (InfeasibleError, DeviceMemoryError, HostMemoryError, torch.OutOfMemoryError)
SMALL = 8  # from this size on, plans of fractions of it say enough


def largest_planned(
    workload: Workload,
    found: BatchSizes,
    make_batch: Callable[[int], Any],
    *,
    max_size: int,
    allow: str | Sequence[str] | None,
    executor: str | None,
    steps: int,
    progress: Progress | None,
) -> BatchSizes:
    """Add the largest batch of a verified plan to what was found for the plain step.

    The smallest budgets that plans can hold at two sizes predict the size; a fit proves it. A fit
    that is refused names the smallest budget of its size, and so mends the prediction.
    """
    say = progress or (lambda text: None)
    options: dict[str, Any] = {"allow": allow, "executor": executor, "progress": progress}
    plain, budget = found.largest.size, found.budget_bytes
    points: list[Point] = []
    for size in (plain // 4, plain // 2) if plain >= SMALL else (plain, 2 * plain):
        say(f"planning a batch of {size}")
        sized = replace(workload, batch=make_batch(size))
        points.append((size, _smallest_budget(sized, **options)))
    size = predicted = min(_largest(points, budget), max_size)
    for _ in range(MAX_FITS):
        if size <= plain:
            break
        say(f"fitting a batch of {size}")
        try:
            sized = replace(workload, batch=make_batch(size))
            with api.fit_workload(sized, budget, steps=steps, **options) as fitted:
                return replace(found, planned=_planned(fitted.result, size, predicted))
        except TOO_LARGE as error:
            minimum = error.minimum_bytes if isinstance(error, InfeasibleError) else None
            if minimum is not None and minimum > budget:
                points = sorted([*points, (size, minimum)])
            size = min(_largest(points, budget), int(STEP_BACK * size))
    note = (
        f"no plan was found that holds a larger batch than {plain} in {format_bytes(budget)} "
        f"(predicted: {predicted})"
    )
    return replace(found, notes=(*found.notes, note))


def _smallest_budget(workload: Workload, **options: Any) -> int:
    """The smallest budget that any plan can hold: what the refusal of an impossible one names."""
    try:
        api.fit_workload(workload, 1, **options).undo()
    except InfeasibleError as refusal:
        if refusal.minimum_bytes is None:
            raise
        return refusal.minimum_bytes
    raise AssertionError("a step in one byte")


def _largest(points: Sequence[Point], budget_bytes: int) -> int:
    """The largest size whose smallest budget, with a margin, is predicted to be within this one."""
    slope = extrapolate(points, 1) - extrapolate(points, 0)
    if slope <= 0:
        return points[-1][0]
    return int((budget_bytes / MARGIN - extrapolate(points, 0)) / slope)


def _planned(result: Result, size: int, predicted_size: int) -> PlannedBatch:
    return PlannedBatch(
        size=size,
        predicted_size=predicted_size,
        predicted_bytes=result.predicted.peak_reserved_bytes,
        peak_bytes=result.measured.peak_bytes,
        peak_reserved_bytes=result.measured.peak_reserved_bytes,
        step_s=result.measured.step_s,
        time_ratio=result.measured.time_ratio,
        techniques=result.decisions.techniques,
    )
