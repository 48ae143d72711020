"""The two directions between device and host memory, each with its own queue of copies.

On CUDA each direction is a stream. All device memory belongs to the computation's stream: it may
be let go as soon as that stream has been told to wait for the copy (`wait`), because the allocator
hands it out again in the order of that stream. Nothing here waits on the host, which runs far ahead
of the device, and `record_stream` is not used. On the CPU the same calls copy at once.

A Lanes has one owner, which makes its calls one at a time.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memfit.errors import UsageError
from memfit.ir.swap import Traffic
from memfit.runtime.swap.arena import Slot

OUT, BACK = 0, 1  # directions: to the host, to the device
_numbers = itertools.count(1)  # of all lanes, which may use one arena after one another
_NOISE_S = 20e-6  # two events with nothing between them may lie this far apart


@dataclass(eq=False)
class Copy:
    """One copy; those of a direction end in the order of their numbers.

    `end` is None once it is known to be over. `owner` is the computation's stream, whose memory
    it reads or writes.
    """

    direction: int
    number: int
    bytes: int
    start: Any = None
    end: Any = None
    owner: Any = None


class Lanes(Protocol):
    """Copies between a device's memory and slots of an arena."""

    device: torch.device
    pinned: bool  # whether slots should be pinned

    def copy_out(self, source: torch.Tensor, slot: Slot) -> Copy:
        """Start to copy `source` (uint8) into a slot, as the computation so far leaves it."""
        ...

    def copy_in(self, slot: Slot, target: torch.Tensor) -> Copy:
        """Start to copy a slot into `target` (uint8), which was just allocated."""
        ...

    def wait(self, copy: Copy) -> None:
        """Let the computation go on after the copy; afterwards its device memory may be freed."""
        ...

    def done(self, copy: Copy) -> bool:
        """Whether the copy is over."""
        ...

    def in_flight(self) -> int:
        """Copies of both directions that are not over."""
        ...

    def synchronize(self) -> None:
        """Return when all copies are over."""
        ...

    def traffic(self) -> tuple[Traffic, Traffic]:
        """What was copied out and back so far; waits for copies under way."""
        ...

    def reset_traffic(self) -> None:
        """Count from zero again."""
        ...


def lanes_for(device: torch.device) -> Lanes:
    """The lanes of a device; UsageError for a type that cannot be swapped."""
    if device.type == "cuda":
        return CudaLanes(device)
    if device.type == "cpu":
        return HostLanes(device)
    raise UsageError(
        f"memory of devices of type {device.type!r} cannot be swapped",
        hint="memfit swaps between cuda and the host; on the cpu it copies within the host",
    )


class _Meter:
    """Adds up one direction."""

    def __init__(self) -> None:
        self.bytes = self.copies = self.stalls = 0
        self.busy_s = self.stalled_s = 0.0

    def copied(self, size: int, seconds: float) -> None:
        self.bytes += size
        self.copies += 1
        self.busy_s += seconds

    def stalled(self, seconds: float) -> None:
        self.stalls += 1
        self.stalled_s += seconds

    def traffic(self) -> Traffic:
        return Traffic(self.bytes, self.copies, self.busy_s, self.stalled_s, self.stalls)


class HostLanes:
    """Copies within host memory, at once: the computation waits for every one of them."""

    pinned = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._meters = (_Meter(), _Meter())

    def copy_out(self, source: torch.Tensor, slot: Slot) -> Copy:
        slot.written = self._copy(OUT, source, slot.view)
        return slot.written

    def copy_in(self, slot: Slot, target: torch.Tensor) -> Copy:
        return self._copy(BACK, slot.view, target)

    def wait(self, copy: Copy) -> None:
        pass

    def done(self, copy: Copy) -> bool:
        return True

    def in_flight(self) -> int:
        return 0

    def synchronize(self) -> None:
        pass

    def traffic(self) -> tuple[Traffic, Traffic]:
        return self._meters[OUT].traffic(), self._meters[BACK].traffic()

    def reset_traffic(self) -> None:
        self._meters = (_Meter(), _Meter())

    def _copy(self, direction: int, source: torch.Tensor, target: torch.Tensor) -> Copy:
        start = time.perf_counter()
        target.copy_(source)
        seconds = time.perf_counter() - start
        self._meters[direction].copied(source.numel(), seconds)
        self._meters[direction].stalled(seconds)
        return Copy(direction, next(_numbers), source.numel())


class CudaLanes:
    """One stream per direction; events say when copies begin and end.

    Events are used again once they have passed, so their number does not grow with the steps.
    """

    pinned = True

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._index = index  # torch takes long to make one of a device
        self._streams = tuple(torch.cuda.Stream(self.device) for _ in (OUT, BACK))
        self._here = torch.cuda.Event()  # where the computation stands when a copy is started
        self._events: list[torch.cuda.Event] = []
        self._under_way: tuple[deque[Copy], deque[Copy]] = (deque(), deque())
        self._waits: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._meters = (_Meter(), _Meter())

    def copy_out(self, source: torch.Tensor, slot: Slot) -> Copy:
        slot.written = self._copy(OUT, source, slot.view, slot.after)
        return slot.written

    def copy_in(self, slot: Slot, target: torch.Tensor) -> Copy:
        return self._copy(BACK, slot.view, target, slot.written)

    def wait(self, copy: Copy) -> None:
        if self.done(copy):
            return
        current = torch.cuda.current_stream(self._index)
        before, after = self._event(), self._event()
        if copy.end is None:  # it ended meanwhile, and asking for events took its own back
            self._events += (before, after)
            return
        before.record(current)
        current.wait_event(copy.end)
        after.record(current)
        self._waits.append((copy.direction, before, after))
        if copy.owner != current:
            copy.owner.wait_event(copy.end)

    def done(self, copy: Copy) -> bool:
        return copy.end is None or copy.end.query()

    def in_flight(self) -> int:
        self._collect()
        return sum(len(copies) for copies in self._under_way)

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def traffic(self) -> tuple[Traffic, Traffic]:
        self.synchronize()
        for _, _, after in self._waits:
            after.synchronize()
        self._collect()
        return self._meters[OUT].traffic(), self._meters[BACK].traffic()

    def reset_traffic(self) -> None:
        self.traffic()
        self._meters = (_Meter(), _Meter())

    def _copy(
        self, direction: int, source: torch.Tensor, target: torch.Tensor, after: Copy | None
    ) -> Copy:
        stream = self._streams[direction]
        current = torch.cuda.current_stream(self._index)
        self._here.record(current)
        stream.wait_event(self._here)
        if after is not None and after.end is not None:
            stream.wait_event(after.end)
        start, end = self._event(), self._event()
        copy = Copy(direction, next(_numbers), source.numel(), start, end, current)
        with stream:  # torch.cuda.stream does the same in Python, in 8 us
            copy.start.record(stream)
            target.copy_(source, non_blocking=True)
            copy.end.record(stream)
        self._under_way[direction].append(copy)
        return copy

    def _event(self) -> torch.cuda.Event:
        if not self._events:
            self._collect()  # only now: to ask for every copy whether another is over takes time
        return self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)

    def _collect(self) -> None:
        """Read the clocks of what is over, and take its events back."""
        for meter, copies in zip(self._meters, self._under_way, strict=True):
            while copies and copies[0].end.query():
                copy = copies.popleft()
                meter.copied(copy.bytes, copy.start.elapsed_time(copy.end) / 1e3)
                self._events += [copy.start, copy.end]
                copy.start = copy.end = None
        while self._waits and self._waits[0][2].query():
            direction, before, after = self._waits.popleft()
            seconds = before.elapsed_time(after) / 1e3
            if seconds > _NOISE_S:
                self._meters[direction].stalled(seconds)
            self._events += [before, after]
