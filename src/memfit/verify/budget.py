"""Does the planned step hold its budget on the machine?"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memfit.errors import ModelError
from memfit.ir.profile import LARGE_PAGE
from memfit.measure.cuda_allocator import settle_optimizer_state
from memfit.measure.memory import Peak, measure_peak, memory_cap
from memfit.measure.step import (
    drop_gradients,
    is_out_of_memory,
    run_first_steps,
    run_step,
    untouched,
)
from memfit.runtime.apply import Applied
from memfit.workload import Workload


@dataclass(frozen=True)
class BudgetCheck:
    """The measured peak, and by how many bytes the step missed the budget (0: it holds)."""

    peak: Peak | None  # None: the step ran out of memory under the cap
    over_bytes: int

    @property
    def holds(self) -> bool:
        """Whether the step stayed within the budget, without allocator retries on CUDA."""
        return self.over_bytes == 0


def check_budget(
    workload: Workload,
    planned: Applied,
    budget_bytes: int | None,
    *,
    steps: int = 3,
    accumulate: int = 1,
) -> BudgetCheck:
    """Run steps under the plan from the workload's own state and measure them.

    On CUDA the allocator is capped at the budget: that run is the proof. Where it fails, a run
    without a cap shows what the allocator takes when it is free to. A plan that counts live bytes
    (a reduction of activations, not a budget) is measured without a cap.
    """
    try:
        return _check(workload, planned, budget_bytes, steps, accumulate)
    finally:
        planned.release()


def run_once(workload: Workload, planned: Applied) -> None:
    """Run a step under the plan, and take it back: what is compiled or set up is there then.

    Else it would first be so under a cap, where it may take what is missing. A step that does not
    fit on the device is none.
    """
    try:
        with untouched(workload), planned:
            try:
                run_first_steps(workload, 1)
            except (RuntimeError, ModelError) as error:
                if not is_out_of_memory(error):
                    raise
                drop_gradients(workload)
    finally:
        planned.release()


def _check(
    workload: Workload, planned: Applied, budget_bytes: int | None, steps: int, accumulate: int
) -> BudgetCheck:
    live = planned.plan.counts == "live"
    if budget_bytes is None or live or workload.device.type != "cuda":
        free = _free(workload, planned, steps, accumulate)
        taken = free.bytes if live else free.reserved_bytes
        return BudgetCheck(free, 0 if budget_bytes is None else max(taken - budget_bytes, 0))
    torch.cuda.empty_cache()
    capped = None
    with untouched(workload), planned, memory_cap(workload.device, budget_bytes):
        try:
            capped = _measure(workload, planned, steps, accumulate)
        except (RuntimeError, ModelError) as error:
            if not is_out_of_memory(error):
                raise
            drop_gradients(workload)
    if planned.lacks_room:
        capped = None
        planned.release()
    if capped is not None and not capped.retries and capped.reserved_bytes <= budget_bytes:
        return BudgetCheck(capped, 0)
    free = _free(workload, planned, steps, accumulate)
    if free.reserved_bytes > budget_bytes:
        return BudgetCheck(free, free.reserved_bytes - budget_bytes)
    if capped is None:
        return BudgetCheck(None, max(free.reserved_bytes - free.bytes, 2 * LARGE_PAGE))
    # Under a cap the allocator places anew: what does not fit may be a whole page.
    return BudgetCheck(capped, max(capped.reserved_bytes - budget_bytes, LARGE_PAGE))


def _free(workload: Workload, planned: Applied, steps: int, accumulate: int) -> Peak:
    """The peak when no cap is in the way."""
    cuda = workload.device.type == "cuda"
    with untouched(workload), planned:
        if cuda:
            torch.cuda.empty_cache()
        return _measure(workload, planned, steps if cuda else 1, accumulate, anew=cuda)


def _measure(
    workload: Workload, planned: Applied, steps: int, accumulate: int, *, anew: bool = False
) -> Peak:
    """The peak of some steps; `anew`: without what the allocator kept of the first ones."""
    run_first_steps(workload, 1)
    settle_optimizer_state(workload.optimizer, workload.device, values=False)
    run_step(workload)
    if anew:
        torch.cuda.synchronize(workload.device)
        torch.cuda.empty_cache()

    def work() -> None:
        for _ in range(steps):
            run_step(workload, accumulate=accumulate)

    return planned.whole(measure_peak(workload, work))
