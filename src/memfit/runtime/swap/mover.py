"""Moves memory between a device and an arena, and lets go of it in the right order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.ir.swap import Traffic
from memfit.runtime.swap.arena import Arena
from memfit.runtime.swap.lanes import Copy, Lanes
from memfit.runtime.swap.moved import Geometry, Moved


class Mover:
    """Moves memory between a device and an arena; safe against finalizers and other threads."""

    def __init__(self, arena: Arena, lanes: Lanes) -> None:
        self.arena, self.lanes = arena, lanes
        self.moves = self.retrievals = self.late = self.stayed = 0
        self._lock = threading.Lock()
        self._dying: deque[tuple[torch.UntypedStorage | None, Copy]] = deque()

    def traffic(self) -> tuple[Traffic, Traffic]:
        """What was copied out and back so far; waits for copies under way."""
        with self._alone():
            return self.lanes.traffic()

    def in_flight(self) -> int:
        """Copies that were started and are not over; nothing is waited for."""
        with self._alone():
            return self.lanes.in_flight()

    def reset(self) -> None:
        """Count from zero again."""
        with self._alone():
            self.lanes.reset_traffic()
            self.moves = self.retrievals = self.late = self.stayed = 0

    def synchronize(self) -> None:
        """Return when all copies are over."""
        with self._alone():
            self.lanes.synchronize()

    def move(self, tensor: torch.Tensor, step: Any) -> Moved:
        """Start to copy a tensor's whole storage out; HostMemoryError when there is no room."""
        moved = Moved(self, tensor, step)
        assert moved.storage is not None
        with self._alone():
            slot = self.arena.take(moved.size)
            try:
                moved.copy = self.lanes.copy_out(_bytes_of(moved.storage), slot)
            except BaseException:
                self.arena.give(slot, None)
                raise
            moved.slot = slot
            self.moves += 1
        return moved

    def release(self, moveds: Sequence[Moved]) -> None:
        """Let the device memory of those that are leaving go, after their copies."""
        with self._alone():
            self._let_go([moved for moved in moveds if moved.leaving])

    def prefetch(self, moveds: Sequence[Moved]) -> None:
        """Start to copy back those that are away."""
        with self._alone():
            for moved in moveds:
                if moved.storage is None and moved.slot is not None:
                    self._start_back(moved)

    def fetch(self, moved: Moved) -> torch.UntypedStorage:
        """The memory of `moved` on the device, filled as far as the computation can see."""
        with self._alone():
            if moved.lost:
                raise UsageError(
                    "a saved tensor that was swapped to the host is gone: its step was given up, "
                    "because its forward or an earlier backward of it failed",
                    hint="run the forward again, and the backward of what that returns",
                )
            if moved.leaving:
                self.stayed += not moved.stayed
                moved.stayed = True
            elif moved.storage is None:
                self.late += 1
                self._start_back(moved)
            if moved.copy is not None and not moved.leaving:
                self.lanes.wait(moved.copy)
                moved.copy = None
            assert moved.storage is not None
            return moved.storage

    def drop(self, moveds: Sequence[Moved]) -> None:
        """Give up memory that nobody will ask for any more, wherever it is."""
        with self._alone():
            self._let_go([moved for moved in moveds if moved.copy is not None])
            for moved in moveds:
                moved.storage, moved.lost = None, True
                if moved.slot is not None:
                    slot, moved.slot = moved.slot, None
                    self.arena.give(slot, None)

    def bury(self, moved: Moved) -> None:
        """Take over from an object that dies: its copy may still use the device memory."""
        if moved.slot is not None:
            self.arena.give(moved.slot, None)  # copies into slots are in order
        if moved.copy is not None:
            self._dying.append((moved.storage, moved.copy))
            self.settle()

    def settle(self) -> None:
        """Free the device memory of what has died, unless someone is at work here, who will."""
        while self._dying and self._lock.acquire(blocking=False):
            try:
                self._bury_all()
            finally:
                self._lock.release()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            with self._lock:
                self._bury_all()
                yield
        finally:
            self.settle()

    def _bury_all(self) -> None:
        while self._dying:
            storage, copy = self._dying.popleft()
            self.lanes.wait(copy)
            del storage

    def _let_go(self, moveds: Sequence[Moved]) -> None:
        """Drop device memory that copies still use; copies of a direction end in order."""
        last: dict[int, Copy] = {}
        for moved in moveds:
            assert moved.copy is not None
            known = last.get(moved.copy.direction)
            if known is None or known.number < moved.copy.number:
                last[moved.copy.direction] = moved.copy
        for copy in last.values():
            self.lanes.wait(copy)
        for moved in moveds:
            moved.storage = moved.copy = None
            for counter in moved.counters:
                counter.let_go()

    def _start_back(self, moved: Moved) -> None:
        assert moved.slot is not None
        # Not torch.empty: it would fill the memory when deterministic algorithms are asked for.
        storage = torch.UntypedStorage(moved.size, device=self.lanes.device)
        moved.copy = self.lanes.copy_in(moved.slot, _bytes_of(storage))
        moved.storage = storage
        slot, moved.slot = moved.slot, None
        self.arena.give(slot, moved.copy)
        self.retrievals += 1


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return Geometry(torch.uint8, 0, (storage.nbytes(),), (1,)).in_(storage)
