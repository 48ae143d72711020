"""What counts the memory in use, and knows the most of it since it was last asked.

Each reads a peak that somebody else keeps, so nothing is sampled: the CUDA allocator's own counter,
the kernel's counter of resident pages, or the recorded events of the CPU allocator.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.errors import UsageError
from memfit.measure.allocations import Event, highest_and_last, recording
from memfit.measure.memory import cuda_capacity, living_storages
from memfit.runtime.swap.host_memory import free_host_bytes
from memfit.units import format_bytes

_STATUS, _RESET = "/proc/self/status", "/proc/self/clear_refs"
_SHARED_POOL = (0, 0)  # of the CUDA allocator, for everything that is not captured
_RESET_PEAK = b"5"  # see proc(5): sets the peak of resident memory to the current value


@dataclass(frozen=True, slots=True)
class Reading:
    """The memory since the reading before: the most in use, and that at the end.

    `held_bytes` is the most that the allocator held, `split_bytes` what of it lay free at the end
    in blocks that are in use in part; None where nobody knows.
    """

    highest_bytes: int
    final_bytes: int
    held_bytes: int | None = None
    retries: int = 0
    split_bytes: int | None = None

    @property
    def end(self) -> Reading:
        """The reading of no time after this one."""
        return Reading(
            self.final_bytes, self.final_bytes, self.held_bytes, split_bytes=self.split_bytes
        )

    def __or__(self, other: Reading) -> Reading:
        """The reading of this time and the `other` time after it."""
        held = [n for n in (self.held_bytes, other.held_bytes) if n is not None]
        return Reading(
            max(self.highest_bytes, other.highest_bytes),
            other.final_bytes,
            max(held) if held else None,
            self.retries + other.retries,
            other.split_bytes,
        )


class Counter(Protocol):
    """Counts memory between `open` and `close`.

    Times below `unread_s` are not worth a reading, which takes as long.
    """

    counts: str
    unread_s: float

    def open(self) -> int:
        """Begin; return the bytes in use now."""
        ...

    def take(self) -> Reading:
        """What happened since the last `take`, or since `open`; begin anew."""
        ...

    def capacity_bytes(self) -> int:
        """What the process may take."""
        ...

    def left_out(self) -> str | None:
        """What the readings did not count, in words, at the end; None: nothing that is known of."""
        ...

    def close(self) -> None:
        """End; harmless when done twice."""
        ...


def counter_for(device: torch.device, counts: str | None) -> Counter:
    """The counter of a device: "allocated" on CUDA; "resident" (default) or "live" on the CPU."""
    if device.type == "cuda" and counts in (None, "allocated"):
        return CudaCounter(device)
    if device.type == "cpu" and counts in (None, "resident"):
        return ResidentCounter()
    if device.type == "cpu" and counts == "live":
        return LiveCounter(device)
    known = {"cuda": ["allocated"], "cpu": ["resident", "live"]}[device.type]
    raise UsageError(
        f"{counts!r} is not counted on {device.type}",
        hint=f"counts= one of: {', '.join(known)}",
    )


class CudaCounter:
    """Reads the CUDA allocator's counters, which the host keeps: the device is not waited for.

    Its peaks start anew with every reading, for everyone who reads them in this process.
    """

    counts = "allocated"
    unread_s = 50e-6  # about what a reading takes

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._retries = 0

    def open(self) -> int:
        """Begin; return the allocated bytes."""
        torch.cuda.init()
        numbers = self._numbers()
        self._retries = int(numbers["num_alloc_retries"])
        torch.cuda.reset_peak_memory_stats(self._device)
        return int(numbers["allocated_bytes"]["all"]["current"])

    def take(self) -> Reading:
        """Allocated bytes since the last reading, and reserved ones as held."""
        numbers = self._numbers()
        torch.cuda.reset_peak_memory_stats(self._device)
        allocated = numbers["allocated_bytes"]["all"]
        before, self._retries = self._retries, int(numbers["num_alloc_retries"])
        return Reading(
            highest_bytes=int(allocated["peak"]),
            final_bytes=int(allocated["current"]),
            held_bytes=int(numbers["reserved_bytes"]["all"]["peak"]),
            retries=self._retries - before,
            split_bytes=int(numbers["inactive_split_bytes"]["all"]["current"]),
        )

    def capacity_bytes(self) -> int:
        """The process's share of the device, less what others hold of it."""
        return cuda_capacity(self._device)

    def left_out(self) -> str | None:
        """The memory of CUDA graphs that counts as free between their launches."""
        size = private_free_bytes(self._device)
        if not size:
            return None
        return (
            f"not in these numbers: up to {format_bytes(size)} in private pools, which CUDA graphs "
            "use while the allocator counts it as free"
        )

    def close(self) -> None:
        """Nothing was opened."""

    def _numbers(self) -> Any:
        # memory_stats() would flatten and sort some 200 numbers to find these.
        return torch.cuda.memory_stats_as_nested_dict(self._device)


class ResidentCounter:
    """Reads the kernel's counter of the process's resident pages, peak included.

    Pages that torch freed and the C library kept count, pages that were never written do not.
    """

    counts = "resident"
    unread_s = 10e-6  # about what a reading takes

    def __init__(self) -> None:
        self._files: tuple[int, int] | None = None

    def open(self) -> int:
        """Begin; return the resident bytes. UsageError where the kernel keeps no such peak."""
        with ExitStack() as stack:
            try:
                status = os.open(_STATUS, os.O_RDONLY)
                stack.callback(os.close, status)
                reset = os.open(_RESET, os.O_WRONLY)
                stack.callback(os.close, reset)
                os.pwrite(reset, _RESET_PEAK, 0)
            except OSError as error:
                raise UsageError(
                    f"the peak of resident memory cannot be read and reset here: {error}",
                    hint='count live tensors instead, MemoryProfiler(counts="live"), which is slow',
                ) from error
            self._files = status, reset
            resident = self._read()[1]
            stack.pop_all()
        return resident

    def take(self) -> Reading:
        """Resident bytes since the last reading."""
        assert self._files is not None, "a counter is read before it was opened"
        highest, final = self._read()
        os.pwrite(self._files[1], _RESET_PEAK, 0)
        return Reading(max(highest, final), final)

    def capacity_bytes(self) -> int:
        """What the process has, and what the system or its control group would still give it."""
        return self._read()[1] + free_host_bytes()

    def left_out(self) -> str | None:
        """Nothing."""
        return None

    def close(self) -> None:
        """Close the kernel's files."""
        files, self._files = self._files, None
        for file in files or ():
            os.close(file)

    def _read(self) -> tuple[int, int]:
        assert self._files is not None, "a counter is read before it was opened"
        text = os.pread(self._files[0], 8192, 0)
        return _kilobytes(text, b"VmHWM:"), _kilobytes(text, b"VmRSS:")


class LiveCounter:
    """Records every allocation on the CPU: exact, and too slow to leave on while training.

    What lives at the start are the tensors that Python's garbage collector knows. Their end is no
    event that torch tells of, so they count until the end of the phase in which they die.
    """

    counts = "live"
    unread_s = 0.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stack: ExitStack | None = None
        self._events: list[Event] = []
        self._live = 0
        self._older: dict[int, tuple[StorageWeakRef, int]] = {}  # from before the start

    def open(self) -> int:
        """Begin; return the bytes of all living tensors."""
        storages = living_storages(self._device)
        self._older = {s.data_ptr(): (StorageWeakRef(s), s.nbytes()) for s in storages}
        self._live = sum(size for _, size in self._older.values())
        self._record()
        return self._live

    def take(self) -> Reading:
        """Live bytes since the last reading."""
        self.close()
        highest, last = highest_and_last(self._events)
        reading = Reading(self._live + highest, self._live + last)
        self._live = reading.final_bytes - self._died()
        self._record()
        return replace(reading, final_bytes=self._live)

    def capacity_bytes(self) -> int:
        """What lives, and what the system or its control group would still give."""
        return self._live + free_host_bytes()

    def left_out(self) -> str | None:
        """Nothing."""
        return None

    def close(self) -> None:
        """Stop the recording under way."""
        if self._stack is not None:
            stack, self._stack = self._stack, None
            stack.close()

    def _died(self) -> int:
        """Bytes from before the start that are gone now, unless there was an event that said so."""
        for event in self._events:
            if event.kind == "free":
                self._older.pop(event.address, None)
        gone = [address for address, (storage, _) in self._older.items() if storage.expired()]
        return sum(self._older.pop(address)[1] for address in gone)

    def _record(self) -> None:
        self._stack = ExitStack()
        self._events = self._stack.enter_context(recording(self._device))


def private_free_bytes(device: torch.device) -> int:
    """Bytes of private pools, such as those of CUDA graphs, that nothing is allocated in now.

    The memory of the whole process is gone through: for the end of a loop, not for every step.
    """
    if torch.cuda.memory.get_allocator_backend() != "native":
        return 0  # others have no pools to be seen
    private = (
        segment
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index
        and tuple(segment.get("segment_pool_id", _SHARED_POOL)) != _SHARED_POOL
    )
    return sum(segment["total_size"] - segment["allocated_size"] for segment in private)


def _kilobytes(text: bytes, name: bytes) -> int:
    start = text.index(name) + len(name)
    return 1024 * int(text[start : text.index(b"kB", start)])
