"""Does the planned step hold its budget on the machine?"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memfit.ir.profile import LARGE_PAGE
from memfit.measure.cuda_allocator import settle_optimizer_state
from memfit.measure.memory import Peak, measure_peak, memory_cap
from memfit.measure.step import run_step, untouched
from memfit.runtime.apply import Applied
from memfit.workload import Workload

WARMUP_STEPS = 2


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

    On CUDA first without a cap, to learn what the allocator takes when it is free to, then with
    the allocator capped at the budget: that run is the proof. A plan that counts live bytes (a
    reduction of activations, not a budget) is measured without a cap.
    """
    device = workload.device
    cuda = device.type == "cuda"
    with untouched(workload), planned:
        if cuda:
            torch.cuda.empty_cache()
        free = _measure(workload, steps if cuda else 1, accumulate)
        if budget_bytes is None:
            return BudgetCheck(free, 0)
        live = planned.plan.counts == "live"
        over = (free.bytes if live else free.reserved_bytes) - budget_bytes
        if over > 0 or live or not cuda:
            return BudgetCheck(free, max(over, 0))
    torch.cuda.empty_cache()
    with untouched(workload), planned, memory_cap(device, budget_bytes):
        try:
            capped = _measure(workload, steps, accumulate)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return BudgetCheck(None, max(free.reserved_bytes - free.bytes, 2 * LARGE_PAGE))
    if capped.retries or capped.reserved_bytes > budget_bytes:
        # Under a cap the allocator places anew: what does not fit may be a whole page.
        return BudgetCheck(capped, max(capped.reserved_bytes - budget_bytes, LARGE_PAGE))
    return BudgetCheck(capped, 0)


def _measure(workload: Workload, steps: int, accumulate: int) -> Peak:
    for _ in range(WARMUP_STEPS):
        run_step(workload)
        settle_optimizer_state(workload.optimizer, workload.device)

    def work() -> None:
        for _ in range(steps):
            run_step(workload, accumulate=accumulate)

    return measure_peak(workload, work)
