"""One run: the plain step at one batch size, under the budget."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from memfit.ir.batch_size import BatchTrial
from memfit.measure.cuda_allocator import settle_optimizer_state
from memfit.measure.memory import measure_peak, memory_cap
from memfit.measure.step import (
    drop_gradients,
    explained_errors,
    is_out_of_memory,
    run_backward,
    run_first_steps,
    run_step,
    untouched,
)
from memfit.measure.timing import time_interleaved
from memfit.workload import Workload

OUT_OF_MEMORY = "out of memory"
SETTLES = 3  # times some steps, at most, until the allocator has found a place for everything
TIMING_LIMIT_S = 10.0


def run_trial(
    workload: Workload,
    size: int,
    budget_bytes: int,
    make_batch: Callable[[int], Any],
    *,
    steps: int,
) -> BatchTrial:
    """Run the step on `size` samples and leave the workload as it was, out of memory or not.

    On CUDA the allocator is capped at the budget; a step that does not hold it is run once more
    without the cap, to learn what it takes. ModelError when the step fails otherwise.
    """

    def attempt(cap_bytes: int | None) -> BatchTrial:
        with untouched(workload, as_it_is=True):
            trial = _attempt(workload, size, budget_bytes, cap_bytes, make_batch, steps)
        gc.collect()
        if workload.device.type == "cuda":
            torch.cuda.empty_cache()
        return trial

    trial = attempt(budget_bytes)
    if trial.holds or workload.device.type != "cuda":
        return trial
    return replace(attempt(None), holds=False, step_s=None)


def _attempt(
    workload: Workload,
    size: int,
    budget_bytes: int,
    cap_bytes: int | None,
    make_batch: Callable[[int], Any],
    steps: int,
) -> BatchTrial:
    try:
        with memory_cap(workload.device, cap_bytes), explained_errors(workload):
            sized = replace(workload, batch=make_batch(size))
            return _measure(sized, size, budget_bytes, steps)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not is_out_of_memory(error):
            raise
        return BatchTrial(size, holds=False, failure=OUT_OF_MEMORY)


def _measure(workload: Workload, size: int, budget_bytes: int, steps: int) -> BatchTrial:
    device = workload.device
    run_first_steps(workload, 1)
    settle_optimizer_state(workload.optimizer, device)
    run_step(workload)

    def measured_steps() -> None:
        for _ in range(3 if device.type == "cuda" else 1):
            run_step(workload)

    backward = measure_peak(workload, partial(_forward_and_backward, workload))
    peak = measure_peak(workload, measured_steps)
    for _ in range(SETTLES - 1):
        if peak.retries:  # the allocator gave back what was free, and lays the next steps out anew
            peak = measure_peak(workload, measured_steps)
    holds = peak.reserved_bytes <= budget_bytes and not peak.retries
    step_s = None
    if holds:
        works = {"step": partial(run_step, workload)}
        timing = time_interleaved(works, device, rounds=steps, warmup=0, limit_s=TIMING_LIMIT_S)
        step_s = timing["step"].median_s
    return BatchTrial(
        size,
        holds=holds,
        peak_bytes=peak.bytes,
        peak_reserved_bytes=peak.reserved_bytes,
        backward_peak_bytes=backward.bytes,
        step_s=step_s,
    )


def _forward_and_backward(workload: Workload) -> None:
    run_backward(workload, workload.compute_loss())
    drop_gradients(workload)
