"""The largest batch in a fixed budget, plain and with a plan: a cell without a step of its own."""

from __future__ import annotations

from memfit.bench.systems.catalogue import memfit_options
from memfit.bench.systems.prepared import Setting
from memfit.ir.bench import LargestBatch
from memfit.train.batch_size.find import find_batch_size


def find_largest(setting: Setting, argument: str) -> LargestBatch:
    """Search both, under the budget as a hard cap on CUDA."""
    budget, options = memfit_options(argument)
    found = find_batch_size(
        setting.workload,
        budget,
        with_plan=True,
        allow=options.get("allow"),
        executor=options.get("executor"),
        steps=setting.steps,
        progress=setting.say,
    )
    planned = found.planned
    return LargestBatch(
        budget_bytes=found.budget_bytes,
        plain_size=found.largest.size,
        plain_samples_per_s=found.largest.samples_per_s,
        planned_size=None if planned is None else planned.size,
        planned_samples_per_s=None if planned is None else planned.samples_per_s,
        planned_ratio=None if planned is None else planned.time_ratio,
        techniques=() if planned is None else tuple(planned.techniques),
        notes=tuple(found.notes),
    )
