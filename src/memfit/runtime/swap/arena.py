"""Host memory for swapped tensors: allocated once, pinned once, handed out in slots.

torch's own pinned blocks are rounded up to powers of two, and pinning takes half a second per
GiB: here a chunk of exactly the wanted size is mapped and pinned in place. Slots are given out
first fit; neighbouring free ones become one again.
"""

from __future__ import annotations

import gc
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memfit.errors import HostMemoryError
from memfit.ir.swap import HOST_GRAIN
from memfit.runtime.swap.host_memory import default_host_budget, free_host_bytes
from memfit.units import format_bytes

__all__ = ["GRAIN", "Arena", "Slot", "Token", "default_host_budget", "free_host_bytes"]

GRAIN = HOST_GRAIN  # slots begin and end at multiples of it
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class Token(Protocol):
    """A copy to the device that may still read a slot; a later one ends after an earlier one."""

    number: int


@dataclass(eq=False)
class Slot:
    """A piece of host memory.

    A copy into it must wait for `after`. `written` is that copy once there is one.
    """

    view: torch.Tensor  # uint8, of the size that was asked for
    after: Any
    written: Any
    chunk: int
    start: int
    stop: int


@dataclass
class _Free:
    start: int
    stop: int
    after: Any


class _Chunk:
    """One mapping, pinned or not, and what is free in it in the order of addresses."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.size = size
        self.memory = _mapped(size)
        self.address = self.memory.data_ptr()
        self.pinned = pinned
        if pinned:
            _pin(self.address, size)
        self.free = [_Free(0, size, None)]

    def take(self, size: int) -> _Free | None:
        for position, free in enumerate(self.free):
            if free.stop - free.start >= size:
                taken = _Free(free.start, free.start + size, free.after)
                free.start = taken.stop
                if free.start == free.stop:
                    del self.free[position]
                return taken
        return None

    def give(self, start: int, stop: int, after: Any) -> None:
        position = next((i for i, f in enumerate(self.free) if f.start >= stop), len(self.free))
        if position < len(self.free) and self.free[position].start == stop:
            right = self.free.pop(position)
            stop, after = right.stop, _later(after, right.after)
        if position and self.free[position - 1].stop == start:
            left = self.free[position - 1]
            left.stop, left.after = stop, _later(left.after, after)
        else:
            self.free.insert(position, _Free(start, stop, after))

    def close(self) -> None:
        if self.pinned:
            _wait_for_copies()
            _unpin(self.address)


class Arena:
    """Host memory in slots. Its statistics count slots rounded up to GRAIN.

    It has what its owner gives it: it never grows by itself. When it is full it collects garbage,
    unless `collects` is switched off by someone who does without a slot, and so asks for many that
    are not there.

    `give` may be called by a finalizer, so at any moment and from any thread: it only queues when
    the arena is busy.
    """

    def __init__(self, bytes: int, pinned: bool) -> None:
        self.pinned = pinned
        self.collects = True
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._chunks: list[_Chunk] = []
        self._returned: deque[tuple[Slot, Any]] = deque()
        self._used = self._highest = self._returns = 0
        self._closed = False
        if bytes:
            self.grow(bytes)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.size for chunk in self._chunks)

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that are taken."""
        with self._lock:
            self._take_back()
            return self._used

    @property
    def highest_bytes(self) -> int:
        """The most that was ever taken at once."""
        return self._highest

    @property
    def returns(self) -> int:
        """How many slots were given back so far."""
        with self._lock:
            self._take_back()
            return self._returns

    def grow(self, bytes: int) -> None:
        """Add a chunk; HostMemoryError when it cannot be allocated or pinned."""
        assert not self._closed, "the arena is closed"
        chunk = _Chunk(_rounded(bytes), self.pinned)
        with self._lock:
            self._chunks.append(chunk)

    def grow_to(self, bytes: int) -> None:
        """Have so many bytes in all, if there are fewer; in one chunk where no slot is taken.

        HostMemoryError when they cannot be had; there is as much as before then.
        """
        assert not self._closed, "the arena is closed"
        before, wanted = self.capacity_bytes, _rounded(bytes)
        if wanted <= before:
            return
        if self.used_bytes:
            self.grow(wanted - before)
            return
        with self._lock:  # first what is there goes: both at once might be more than may be taken
            while self._chunks:
                self._chunks.pop().close()
        try:
            self.grow(wanted)
        except HostMemoryError as error:
            failed = error.with_traceback(None)  # its frames hold what could not be pinned
        else:
            return
        if before:
            self.grow(before)
        raise failed

    def take(self, size: int) -> Slot:
        """A slot of `size` bytes; HostMemoryError when there is no room."""
        slot = self._take(size)
        if slot is None and self.collects:
            gc.collect()  # a step that failed may hold slots as garbage
            slot = self._take(size)
        if slot is None:
            raise self._full(_rounded(size))
        return slot

    def give(self, slot: Slot, after: Token | None) -> None:
        """Free a slot; `after` is the copy that may still read it."""
        self._returned.append((slot, after))
        if self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Unpin and let go of all memory; harmless when done twice."""
        if self._closed:
            return
        self._closed = True
        self._returned.clear()
        chunks, self._chunks = self._chunks, []
        self._used = 0
        if os.getpid() == self._process:  # a forked child inherits neither the pages nor CUDA
            for chunk in chunks:
                chunk.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Bound beforehand: at the end of a process the modules' names are gone.
        if hasattr(self, "_closed") and not is_finalizing():
            self.close()

    def _take(self, size: int) -> Slot | None:
        assert not self._closed, "the arena is closed"
        wanted = _rounded(size)
        with self._lock:
            self._take_back()
            found = self._find(wanted)
            if found is None:
                return None
            number, free = found
            self._used += wanted
            self._highest = max(self._highest, self._used)
            view = self._chunks[number].memory[free.start : free.start + size]
            return Slot(view, free.after, None, number, free.start, free.stop)

    def _find(self, size: int) -> tuple[int, _Free] | None:
        """The first free piece of this size, and the number of its chunk."""
        for number, chunk in enumerate(self._chunks):
            free = chunk.take(size)
            if free is not None:
                return number, free
        return None

    def _take_back(self) -> None:
        while self._returned:
            slot, after = self._returned.popleft()
            if self._closed:
                continue
            self._chunks[slot.chunk].give(slot.start, slot.stop, after)
            self._used -= slot.stop - slot.start
            self._returns += 1

    def _full(self, wanted: int) -> HostMemoryError:
        pieces = [free.stop - free.start for chunk in self._chunks for free in chunk.free]
        return HostMemoryError(
            f"no room to swap {format_bytes(wanted)} to the host: {format_bytes(self._used)} of "
            f"{format_bytes(self.capacity_bytes)} are in use, "
            f"the largest free piece has {format_bytes(max(pieces, default=0))}",
            hint="give swapping more host memory (host_budget, --host-budget)",
        )


def _rounded(size: int) -> int:
    assert size >= 0, size
    return max(1, -(-size // GRAIN)) * GRAIN


def _later(a: Token | None, b: Token | None) -> Token | None:
    if a is None or b is None:
        return a or b
    return a if a.number > b.number else b


def _mapped(size: int) -> torch.Tensor:
    """Fresh memory that starts at a page; its pages come when they are first touched."""
    free = free_host_bytes()
    try:
        if size > free:
            raise OSError("more than is free")
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise HostMemoryError(
            f"cannot allocate {format_bytes(size)} of host memory for swapping, "
            f"{format_bytes(free)} are free: {error}",
            hint="give swapping less host memory (host_budget, --host-budget), or free some",
        ) from error
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with suppress(OSError, AttributeError):  # advice: a kernel without it does without
            pages.madvise(getattr(mmap, advice))
    return torch.frombuffer(pages, dtype=torch.uint8)


def _pin(address: int, size: int) -> None:
    runtime: Any = torch.cuda.cudart()
    answer = runtime.cudaHostRegister(address, size, _PORTABLE)
    if int(answer) != 0:
        _clear_last_error()
        raise HostMemoryError(
            f"cannot pin {format_bytes(size)} of host memory for swapping: the system answered "
            f"{runtime.cudaGetErrorString(answer)!r}",
            hint="give swapping less host memory (host_budget, --host-budget), or raise the limit "
            "on locked memory (ulimit -l; in a container --ulimit memlock=-1)",
        )


def _wait_for_copies() -> None:
    """Wait for all devices that may copy: the current one, and others that hold tensors."""
    torch.cuda.synchronize()
    here = torch.cuda.current_device()
    for index in range(torch.cuda.device_count()):
        if index != here and torch.cuda.memory_reserved(index):
            torch.cuda.synchronize(index)


def _clear_last_error() -> None:
    """Take up the error that CUDA keeps until the next launch, which would be blamed for it.

    It keeps one for each thread, whatever the device.
    """
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _unpin(address: int) -> None:
    answer = torch.cuda.cudart().cudaHostUnregister(address)
    assert int(answer) == 0, f"host memory at {address:#x} could not be unpinned: {answer}"
