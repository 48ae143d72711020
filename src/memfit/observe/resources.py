"""What a run takes before and after: memory of device and host, storage, time.

Every number is measured, projected from measured ones, or said not to be known.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import IO, Any, cast

import torch

from memfit.errors import UsageError
from memfit.fitted import Fitted
from memfit.ir.resources import Amount, How, Resource, Resources
from memfit.ir.result import Result
from memfit.measure.step import run_step, untouched
from memfit.observe.counters import ResidentCounter
from memfit.runtime.split import samples_in
from memfit.workload import Workload

STEPS = 2  # that the host's memory is watched in
_NO_BASELINE = "the plain step does not fit on the device"
_NO_SAMPLES = "give --samples"
_NO_EPOCHS = "give --samples and --epochs"


def resources(
    fitted: Fitted, workload: Workload, *, samples: int | None = None, epochs: int | None = None
) -> Resources:
    """What a run of `epochs` over `samples` takes without the plan and with it.

    The plan is at work again when it returns; the workload is as it was.
    """
    for name, count in (("samples", samples), ("epochs", epochs)):
        if count is not None and count < 1:
            raise UsageError(f"{name} is {count}", hint="it counts: 1 or more")
    result = fitted.result
    return Resources(
        workload=result.workload,
        device=result.device,
        budget_bytes=result.budget_bytes,
        samples=samples,
        epochs=epochs,
        verdict=result.verdict,
        rows=(
            *_device_memory(result),
            *_host_memory_and_storage(fitted, workload),
            *_time(result, _samples_of_a_step(fitted), samples, epochs),
        ),
    )


def _device_memory(result: Result) -> list[Resource]:
    baseline, measured = result.baseline, result.measured
    how: How = "measured" if baseline.measured else "projected"
    why = None if baseline.measured else _NO_BASELINE
    return [
        Resource(
            "device memory, peak",
            "bytes",
            Amount(baseline.peak_bytes, how, why),
            Amount(measured.peak_bytes, "measured"),
        ),
        Resource(
            "device memory, reserved",
            "bytes",
            Amount(baseline.peak_reserved_bytes, how, why),
            Amount(measured.peak_reserved_bytes, "measured"),
        ),
    ]


def _host_memory_and_storage(fitted: Fitted, workload: Workload) -> list[Resource]:
    """What the process takes of the host during steps, and what a checkpoint takes after them.

    Libraries and what the process holds beside the step are part of it.
    """
    part, batches = fitted.workload, fitted.profile.accumulate
    without = Amount(None, "not measured", _NO_BASELINE)
    before = without, without
    fitted.undo()
    try:
        if fitted.result.baseline.measured:
            before = _watched(workload, nullcontext(), batches // fitted.plan.split)
        after = _watched(part, fitted.applied, batches)
    finally:
        fitted.applied.install()
    names = "host memory, peak", "storage of a checkpoint"
    rows = zip(names, before, after, strict=True)
    return [Resource(name, "bytes", *amounts) for name, *amounts in rows]


def _watched(
    workload: Workload, at_work: AbstractContextManager[Any], accumulate: int
) -> tuple[Amount, Amount]:
    """The host's peak in some steps, and the bytes of model and optimizer as torch.save writes."""

    with untouched(workload), at_work:
        with _host_peak() as peak:
            for _ in range(STEPS):
                run_step(workload, accumulate=accumulate)
        file = _Counter()
        model, optimizer = workload.model, workload.optimizer
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, cast(IO[bytes], file))
    return peak[0], Amount(file.bytes, "measured")


@contextmanager
def _host_peak() -> Iterator[list[Amount]]:
    """A list that gets the peak of the process's memory while the block ran."""
    found: list[Amount] = []
    counter = ResidentCounter()
    try:
        counter.open()
    except UsageError as error:
        yield found
        found.append(Amount(None, "not measured", error.message))
        return
    try:
        yield found
        found.append(Amount(counter.take().highest_bytes, "measured"))
    finally:
        counter.close()


class _Counter(io.RawIOBase):
    """A file that only counts what is written to it."""

    bytes = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.bytes += size
        return size


def _samples_of_a_step(fitted: Fitted) -> int:
    return samples_in(fitted.workload.batch) * fitted.profile.accumulate


def _time(result: Result, batch: int, samples: int | None, epochs: int | None) -> list[Resource]:
    after_s = result.measured.step_s
    before_s = result.baseline.step_s if result.baseline.measured else None
    before = Amount(before_s, "measured")
    if before_s is None:
        before = Amount(None, "not measured", _NO_BASELINE)
    after = Amount(after_s, "measured")
    batches = None if samples is None else math.ceil(samples / batch)
    run = None if batches is None or epochs is None else batches * epochs
    return [
        Resource("time of a step", "seconds", before, after),
        Resource("rate", "samples/s", _rate(before, batch), _rate(after, batch)),
        _times("time of an epoch", before, after, batches, _NO_SAMPLES),
        _times("time of the run", before, after, run, _NO_EPOCHS),
    ]


def _rate(step: Amount, batch: int) -> Amount:
    if not step.value:
        return step
    return Amount(batch / step.value, "measured")


def _times(name: str, before: Amount, after: Amount, count: int | None, why: str) -> Resource:
    def times(step: Amount) -> Amount:
        if step.value is None:
            return step
        if count is None:
            return Amount(None, "not measured", why)
        return Amount(step.value * count, "projected")

    return Resource(name, "seconds", times(before), times(after))
