"""MemoryProfiler: the memory and the seconds of every phase of every step of a training loop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TypeVar

import torch

from memfit.errors import UsageError
from memfit.ir.memory_series import (
    CSV_COLUMNS,
    GB,
    MB,
    SPIKE_MB,
    MemorySeries,
    PhaseStatistics,
    Snapshot,
    Spike,
)
from memfit.measure.census import failure_notes
from memfit.observe.counters import Counter, Reading, counter_for
from memfit.observe.device import resolve_device
from memfit.observe.record import Record
from memfit.observe.stopwatch import Stopwatch
from memfit.report.csv import csv_text
from memfit.units import parse_bytes

T = TypeVar("T")
LOADER = "loader"  # the phase in which `steps` waits for a batch
OTHER = "other"  # everything in and before a step that no phase covers
WHOLE = "step"  # a step without phases
_at_work: dict[torch.device, MemoryProfiler] = {}


class MemoryProfiler:
    """Peak, mean and lowest memory of each phase of a loop, from the inside of the phases.

    On CUDA the bytes are those that torch's allocator has handed out; on the CPU those of the
    process that are resident, or with `counts="live"`, slowly, those of tensors. `capacity` is
    what they are compared with, by default all that the process may take.

        with MemoryProfiler() as memory:
            for batch in memory.steps(loader):
                with memory.phase("forward"):
                    loss = loss_fn(model, batch)
                ...
        print(memory.generate_report())

    Or two calls in any loop: `start()` before it, `record_step(step, phase)` at the end of each
    step. Peaks come from counters of the whole process, which start anew with every phase:
    `torch.cuda.max_memory_allocated` does, too, so one profiler runs at a time.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        capacity: int | str | None = None,
        counts: str | None = None,
        times: bool = True,
    ) -> None:
        self.device = resolve_device(device)
        self._capacity = None if capacity is None else _positive(capacity)
        self._counter: Counter = counter_for(self.device, counts)
        self._stopwatch = Stopwatch(self.device) if times else None
        self._listeners: list[Callable[[], None]] = []
        self._records: list[Record] = []
        self._rest: Record | None = None  # of the step under way: what no phase covers
        self._phases: dict[str, Record] = {}  # of the step under way
        self._begun: list[Record] = []  # of a step whose batch never came: its loader failed
        self._phase: str | None = None  # under way
        self._last: Reading | None = None
        self._last_at_s = 0.0
        self._last_step = -1
        self._highest_bytes = 0
        self._started_s: float | None = None
        self._stopped_s: float | None = None
        self._initial_bytes = self._capacity_bytes = 0
        self._notes: list[str] = []  # of an error that ended the loop
        self._left_out: str | None = None  # what the numbers do not say, known at the end

    def start(self) -> Self:
        """Begin to count."""
        if self._started_s is not None:
            raise UsageError(
                "the profiler was started before", hint="make a new MemoryProfiler for a new loop"
            )
        if self.device in _at_work:
            raise UsageError(
                f"another memory profiler is at work on {self.device}, and both would reset the "
                "one peak that the device has",
                hint="stop() it before this one starts",
            )
        self._initial_bytes = self._counter.open()
        self._capacity_bytes = self._capacity or self._counter.capacity_bytes()
        _at_work[self.device] = self
        if self._stopwatch is not None:
            self._stopwatch.start()
        self._started_s = time.perf_counter()
        return self

    def stop(self) -> MemorySeries:
        """End, and return what was seen."""
        self._check_running("stop()")
        if self._rest is not None:
            raise UsageError(
                f"stop() inside step {self._rest.step}, which is not over",
                hint="leave the step's with block first",
            )
        return self._finish()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if self._stopped_s is not None:
            return
        if error is None:
            self.stop()
            return
        # The step that failed is worth seeing.
        if self._rest is not None:
            self._failed(error, OTHER)
            self._end_step(self._rest)
        elif self._notes:
            self._records += self._begun
        elif isinstance(error, Exception):
            self._record_unfinished()
            self._failed(error, OTHER)
        self._finish()

    def record_step(self, step: int, phase: str = WHOLE) -> None:
        """Record what happened since the last record as this phase of this step."""
        self._check_running("record_step()")
        if self._rest is not None:
            raise UsageError(
                f"record_step() inside step {self._rest.step}, which records itself",
                hint="either with memory.step(): and phases, or record_step(), not both",
            )
        record = Record(self._number(step, again=True), _name(phase))
        self._lap(record)
        self._records.append(record)
        self._tell()

    @contextmanager
    def step(self, number: int | None = None) -> Iterator[None]:
        """A step, with its phases inside; numbered from 0 unless `number` is given."""
        rest = self._begin_step(number)
        try:
            yield
        except Exception as error:
            self._failed(error, OTHER)
            raise
        finally:
            self._end_step(rest)

    def steps(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of a loader, each with a step around it that begins by waiting for it."""
        batches = iter(loader)
        while True:
            rest = self._begin_step(None)
            fetched: list[T] = []  # emptied at once: the batch is the loop's to let go
            try:
                with self.phase(LOADER):
                    fetched.extend(_next_of(batches))
            except BaseException:
                self._begun = [*self._phases.values()]
                self._cancel_step()
                raise
            if not fetched:
                self._cancel_step()
                return
            try:
                yield fetched.pop()
            except BaseException:
                self._end_step(rest)
                raise
            self._end_step(rest, goes_on=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A named part of the step under way; parts of the same name count as one."""
        self._check_running(f"phase({name!r})")
        rest = self._rest
        if rest is None:
            raise UsageError(
                f"phase {name!r} begins outside of a step",
                hint="with memory.step(): around it, or for batch in memory.steps(loader):",
            )
        if self._phase is not None:
            raise UsageError(
                f"phase {name!r} begins inside phase {self._phase!r}: phases do not nest",
                hint=f"leave {self._phase!r} first, or name the inner part alone",
            )
        if _name(name) == OTHER:
            raise UsageError(
                f"{OTHER!r} is the name of what lies outside all phases", hint="choose another"
            )
        self._gap(rest)
        self._phase = name
        record = self._phases.setdefault(name, Record(rest.step, name))
        try:
            yield
        except Exception as error:
            self._failed(error, name)
            raise
        finally:
            self._phase = None
            if self._rest is rest:
                self._lap(record)

    @property
    def series(self) -> MemorySeries:
        """What was seen so far, as data; on CUDA it waits for the device."""
        if self._started_s is None:
            raise UsageError(
                "the profiler was not started, so it has seen nothing",
                hint="with MemoryProfiler() as memory:, or memory.start() before the loop",
            )
        if self._stopwatch is not None and self._stopped_s is None:
            self._stopwatch.settle()
        timed = self._stopwatch is not None
        return MemorySeries(
            device=str(self.device),
            counts=self._counter.counts,
            capacity_bytes=self._capacity_bytes,
            initial_bytes=self._initial_bytes,
            snapshots=tuple(record.snapshot(timed) for record in self._records),
            duration_s=(self._stopped_s or time.perf_counter()) - self._started_s,
            notes=(*self._notes, *([] if self._left_out is None else [self._left_out])),
        )

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """Every recorded phase, in order."""
        return self.series.snapshots

    @property
    def peak_usage_bytes(self) -> int:
        """The most in use in any phase."""
        return self._peak.used_bytes

    @property
    def peak_usage_mb(self) -> float:
        """The most in use in any phase, in MB (2^20 bytes)."""
        return self.peak_usage_bytes / MB

    @property
    def peak_usage_gb(self) -> float:
        """The most in use in any phase, in GB (2^30 bytes)."""
        return self.peak_usage_bytes / GB

    @property
    def peak_step(self) -> int:
        """The first step that reached the peak."""
        return self._peak.step

    @property
    def peak_phase(self) -> str:
        """The phase of that step in which it did."""
        return self._peak.phase

    @property
    def _peak(self) -> Snapshot:
        """The record with the highest use, without waiting for the device, as a loop may ask."""
        if not self._records:
            return self.series.peak  # says why there is none
        return max((r.snapshot(timed=False) for r in self._records), key=lambda s: s.used_bytes)

    def phase_statistics(self) -> dict[str, PhaseStatistics]:
        """Mean, highest and lowest use of each phase, in MB."""
        return self.series.phase_statistics()

    def identify_spikes(self, threshold_mb: float = SPIKE_MB) -> list[Spike]:
        """Rises by more than `threshold_mb` MB from one step to the next: step, MB, phase."""
        return self.series.identify_spikes(threshold_mb)

    def generate_report(self) -> str:
        """The report as text."""
        from memfit.report.memory_series import memory_report  # rich, which a loop can do without

        return memory_report(self.series)

    def export_csv(self, path: str | Path | None = None) -> str:
        """A row for every phase of every step, as CSV text; also written to `path` if given."""
        return _write(csv_text(self.series.rows(), CSV_COLUMNS), path)

    def export_json(self, path: str | Path | None = None) -> str:
        """The series and its summary as JSON text; also written to `path` if given."""
        return _write(json.dumps(self.series.to_json(), indent=1) + "\n", path)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after every recorded step; return what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    @property
    def latest(self) -> Record | None:
        """The last record, without waiting for the device; None when there is none."""
        return self._records[-1] if self._records else None

    @property
    def highest_bytes(self) -> int:
        """The most in use so far, the step under way included; 0 before the start."""
        return self._highest_bytes

    @property
    def capacity_bytes(self) -> int:
        """What the process may take; 0 before the start."""
        return self._capacity_bytes

    def _failed(self, error: BaseException, phase: str) -> None:
        """Take down how far the loop came and what was live, where it is still there."""
        if self._notes or not isinstance(error, Exception):
            return
        step = self._last_step if self._rest is None else self._rest.step
        used = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        self._notes = failure_notes(error, step, phase, self.device, used)

    def _begin_step(self, number: int | None) -> Record:
        self._check_running("step()")
        if self._rest is not None:
            raise UsageError(
                f"a step begins inside step {self._rest.step}: steps do not nest",
                hint="leave one step before the next",
            )
        wanted = self._last_step + 1 if number is None else number
        rest = Record(self._number(wanted, again=False), OTHER)  # from the end of the step before
        self._rest, self._phases = rest, {}
        self._notes, self._begun = [], []  # the loop went on
        return rest

    def _end_step(self, rest: Record, goes_on: bool = False) -> None:
        if self._rest is not rest:  # it was ended when the loop around it failed
            return
        if goes_on and self._phases:
            self._gap(rest)
        else:
            self._lap(rest)
        if not self._phases:
            rest.phase = WHOLE
        self._records += [*self._phases.values(), rest]
        self._rest = None
        self._tell()

    def _record_unfinished(self) -> None:
        """Record what happened since the last record, which the loop failed before it could.

        It counts to the step after the last recorded one: a phase that was still to come of that
        one is not told from it.
        """
        record = Record(self._number(self._last_step + 1, again=False), OTHER)
        self._lap(record)
        self._records.append(record)

    def _cancel_step(self) -> None:
        assert self._rest is not None
        self._last_step = self._rest.step - 1
        self._rest = None

    def _gap(self, rest: Record) -> None:
        """Read what lies before a phase; where that is next to nothing it counts to the phase.

        Most phases begin where another ends: half of what profiling costs would go there.
        """
        if self._last is None or time.perf_counter() - self._last_at_s >= self._counter.unread_s:
            self._lap(rest)
            return
        rest.add(self._last.end)

    def _lap(self, record: Record) -> None:
        self._last = reading = self._counter.take()
        self._highest_bytes = max(self._highest_bytes, reading.highest_bytes)
        record.add(reading)
        if self._stopwatch is not None:
            self._stopwatch.lap(record.add_seconds)
        self._last_at_s = time.perf_counter()

    def _tell(self) -> None:
        if self._stopwatch is not None:
            self._stopwatch.collect()
        for listener in tuple(self._listeners):
            listener()

    def _finish(self) -> MemorySeries:
        if self._stopwatch is not None:
            self._stopwatch.settle()
        self._counter.close()
        _at_work.pop(self.device, None)
        self._stopped_s = time.perf_counter()
        self._left_out = self._counter.left_out()
        return self.series

    def _number(self, step: int, *, again: bool) -> int:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise UsageError(f"step is {step!r}, not a number from 0 on", hint="count steps by int")
        if step < self._last_step or (step == self._last_step and not again):
            raise UsageError(
                f"step {step} comes after step {self._last_step}",
                hint="count steps on over epochs",
            )
        self._last_step = step
        return step

    def _check_running(self, what: str) -> None:
        if self._started_s is None:
            raise UsageError(
                f"{what} before start()",
                hint="with MemoryProfiler() as memory:, or memory.start() before the loop",
            )
        if self._stopped_s is not None:
            raise UsageError(
                f"{what} after stop()", hint="make a new MemoryProfiler for another loop"
            )


def _next_of(batches: Iterator[T]) -> Iterator[T]:
    """The next batch; nothing at the end."""
    for batch in batches:
        yield batch
        return


def _name(phase: str) -> str:
    if not isinstance(phase, str) or not phase.strip():
        raise UsageError(f"{phase!r} is no name for a phase", hint='for example "forward"')
    return phase


def _positive(capacity: int | str) -> int:
    size = parse_bytes(capacity)
    if size <= 0:
        raise UsageError(f"capacity is {capacity!r}, not above zero", hint='capacity="16GiB"')
    return size


def _write(text: str, path: str | Path | None) -> str:
    if path is not None:
        try:
            Path(path).write_text(text, encoding="utf-8", newline="")
        except OSError as error:
            raise UsageError(
                f"{str(path)!r} cannot be written: {error.strerror}",
                hint="choose a folder that exists and is yours to write to",
            ) from error
    return text
