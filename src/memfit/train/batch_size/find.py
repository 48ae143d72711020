"""The largest batch within a budget, and the fastest, in at most five runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from memfit.errors import InfeasibleError, ModelError, UsageError
from memfit.ir.batch_size import BatchSizes, BatchTrial
from memfit.ir.profile import DeviceFacts
from memfit.measure.cuda_allocator import prefer_expandable_segments
from memfit.measure.device import device_facts
from memfit.planning.budget import AUTO_SHARE, check_budget_text
from memfit.runtime.signature import describe
from memfit.runtime.split import samples_in
from memfit.train.batch_size.planned import largest_planned
from memfit.train.batch_size.predict import next_size, predicted_bytes
from memfit.train.batch_size.rebatch import HINT, checked, rebatch
from memfit.train.batch_size.trial import OUT_OF_MEMORY, run_trial
from memfit.units import format_bytes, parse_bytes
from memfit.workload import Workload

Progress = Callable[[str], None]
Run = Callable[[int], BatchTrial]
MAX_SIZE = 65536


def find_batch_size(
    workload: Workload,
    budget: str | int | None = None,
    *,
    utilization: float | None = None,
    with_plan: bool = False,
    allow: str | Sequence[str] | None = None,
    executor: str | None = None,
    max_size: int = MAX_SIZE,
    steps: int = 10,
    make_batch: Callable[[int], Any] | None = None,
    progress: Progress | None = None,
) -> BatchSizes:
    """Find the largest batch of the plain step within `budget`, or a share of the device.

    `with_plan` also looks for the largest that a plan allows there; `allow` and `executor` are for
    that plan. `make_batch(size)` builds batches; without it the example batch is repeated. Each
    size is timed over `steps` steps. The workload is as it was afterwards.
    """
    say = progress or (lambda text: None)
    device = device_facts(workload.device)
    budget_bytes = resolve_bytes(budget, utilization, device)
    _check_counts(max_size, steps)
    if make_batch is None:
        samples_in(workload.batch, hint=HINT)  # refuses a batch that cannot be resized
        make_batch = partial(rebatch, workload.batch)
    else:
        make_batch = checked(make_batch)
    notes: list[str] = []
    if (setting := prefer_expandable_segments(workload.device)) is not None:
        notes.append(setting)
    if (free := int(AUTO_SHARE * device.free_bytes)) < budget_bytes and device.type == "cpu":
        # No cap holds there: the system would end the process.
        notes.append(f"{format_bytes(budget_bytes)} asked for, but {format_bytes(free)} are free")
        budget_bytes = free

    def run(size: int) -> BatchTrial:
        say(f"running a batch of {size}")
        return run_trial(workload, size, budget_bytes, make_batch, steps=steps)

    trials = search(run, budget_bytes, max_size)
    held = [trial for trial in trials if trial.holds]
    if not held:
        raise _too_small(trials, budget_bytes)
    largest = max(held, key=lambda trial: trial.size)
    if largest.size == max_size:
        notes.append(f"larger batches than {max_size} were not looked for (max_size)")
    found = BatchSizes(
        workload=describe(workload),
        device=vars(device),
        budget_bytes=budget_bytes,
        trials=tuple(trials),
        largest=largest,
        fastest=max(held, key=lambda trial: trial.samples_per_s or 0),
        notes=tuple(notes),
    )
    if not with_plan:
        return found
    return largest_planned(
        workload,
        found,
        make_batch,
        max_size=max_size,
        allow=allow,
        executor=executor,
        steps=steps,
        progress=progress,
    )


def search(run: Run, budget_bytes: int, max_size: int) -> list[BatchTrial]:
    """Run sizes until the largest that holds is known, or the runs are used up."""
    trials: list[BatchTrial] = []
    while (size := next_size(trials, budget_bytes, max_size)) is not None:
        predicted = None
        if sum(trial.peak_bytes is not None for trial in trials) > 1:
            predicted = predicted_bytes(trials, size)
        try:
            trial = run(size)
        except ModelError as error:
            if not trials:
                raise
            trial = BatchTrial(size, holds=False, failure=error.message)
        trials.append(replace(trial, predicted_bytes=predicted))
    return trials


def resolve_bytes(budget: str | int | None, utilization: float | None, device: DeviceFacts) -> int:
    """The budget in bytes, from exactly one of a budget and a share of the device."""
    if (budget is None) == (utilization is None):
        what = "neither a budget nor a utilization" if budget is None else "both"
        raise UsageError(
            f"{what} given, one is needed", hint='budget="16GiB", or utilization=0.8 of the device'
        )
    if utilization is not None:
        if not 0 < utilization <= 1:
            raise UsageError(
                f"a utilization of {utilization:g} is not a share of the device",
                hint="0.8 is 80 % of the device's memory",
            )
        return int(utilization * device.capacity_bytes)
    assert budget is not None
    check_budget_text(budget, device)
    if isinstance(budget, str) and budget.strip().endswith("%"):
        raise UsageError(
            f"{budget.strip()} of the plain step's peak means nothing while its batch size is open",
            hint="give bytes, or a share of the device: --utilization 0.8 (utilization=0.8)",
        )
    if isinstance(budget, str) and budget.strip().lower() == "auto":
        return int(AUTO_SHARE * device.free_bytes)
    return parse_bytes(budget)


def _check_counts(max_size: int, steps: int) -> None:
    for name, count in (("max_size", max_size), ("steps", steps)):
        if count < 1:
            raise UsageError(f"{name} is {count}", hint="it is a count: 1 or more")


def _too_small(trials: Sequence[BatchTrial], budget_bytes: int) -> InfeasibleError:
    """What to raise when not even the smallest batch fits."""
    ran = [trial for trial in trials if trial.failure in (None, OUT_OF_MEMORY)]
    smallest = min(ran, key=lambda trial: trial.size)
    needs = smallest.peak_reserved_bytes
    takes = (
        "more than the device has" if needs is None else f"{format_bytes(needs)} ({needs} bytes)"
    )
    other = "".join(f"; a batch of {t.size}: {t.failure}" for t in trials if t not in ran)
    return InfeasibleError(
        f"a batch of {smallest.size} does not fit into {format_bytes(budget_bytes)}: it takes "
        f"{takes}{other}",
        budget_bytes=budget_bytes,
        minimum_bytes=needs,
        hint="give a larger budget, or let a plan save memory: "
        f"memfit fit TARGET --batch {smallest.size} --budget {budget_bytes}",
    )
