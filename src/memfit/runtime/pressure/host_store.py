"""The host's side of a valve: memory that grows as it is needed, and goes when it is not."""

from __future__ import annotations

import torch

from memfit.errors import HostMemoryError
from memfit.ir.swap import Traffic
from memfit.runtime.swap.arena import GRAIN, Arena, default_host_budget
from memfit.runtime.swap.lanes import lanes_for
from memfit.runtime.swap.moved import Moved
from memfit.runtime.swap.mover import Mover
from memfit.units import format_bytes

_CHUNK = 256 * 2**20  # the arena's first; later ones double it


class HostStore:
    """Host memory for storages. Nothing is set up before the first one comes."""

    def __init__(self, device: torch.device, budget: int | None) -> None:
        self._device = device
        self._budget = budget
        self._mover: Mover | None = None
        self._is_closed = True
        self._refused: tuple[int, int] | None = None  # bytes, and the slots given back until then
        self.highest_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        """Host memory that is held now."""
        return 0 if self._mover is None or self._is_closed else self._mover.arena.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """How much of it is in use."""
        return 0 if self._mover is None or self._is_closed else self._mover.arena.used_bytes

    def traffic(self) -> tuple[Traffic, Traffic]:
        """The copies out and back so far; waits for those under way."""
        return (Traffic(), Traffic()) if self._mover is None else self._mover.traffic()

    def in_flight(self) -> int:
        """Copies that were started and are not over; nothing is waited for."""
        return 0 if self._mover is None else self._mover.in_flight()

    def is_full(self, size: int) -> bool:
        """Whether so much, or less, was refused and no host memory came back since then."""
        if self._refused is None:
            return False
        assert self._mover is not None
        least, returns = self._refused
        if self._mover.arena.returns != returns:
            self._refused = None
            return False
        return size >= least

    def move(self, tensor: torch.Tensor) -> Moved:
        """Start to copy a tensor's storage to the host; HostMemoryError when there is no room.

        Garbage that holds host memory is left to the caller, whose lock its finalizers may want.
        """
        mover = self._opened()
        size = tensor.untyped_storage().nbytes()
        try:
            moved = mover.move(tensor, None)
        except HostMemoryError as error:
            self._refused = size, mover.arena.returns
            if not self._has_grown(mover.arena, size):
                raise self._no_room(mover.arena, size) from error
            moved, self._refused = mover.move(tensor, None), None
        self.highest_bytes = max(self.highest_bytes, mover.arena.highest_bytes)
        return moved

    def is_over(self, moved: Moved) -> bool:
        """Whether the copy of a storage is made."""
        return moved.copy is None or moved.mover.lanes.done(moved.copy)

    def close_if_empty(self) -> None:
        """Give the host memory back if nothing lies in it."""
        if self._mover is not None and not self._is_closed and self.used_bytes == 0:
            self._mover.synchronize()
            self._mover.arena.close()
            self._is_closed = True

    def _opened(self) -> Mover:
        if self._mover is None:
            lanes = lanes_for(self._device)
            self._mover = Mover(Arena(0, lanes.pinned), lanes)
        elif self._is_closed:
            self._mover.arena = Arena(0, self._mover.lanes.pinned)
        self._mover.arena.collects = False
        if self._is_closed:
            self._is_closed, self._refused = False, None
        return self._mover

    def _has_grown(self, arena: Arena, size: int) -> bool:
        """Whether there is room for `size` more bytes now; the budget may not allow it."""
        if self._budget is None:
            self._budget = default_host_budget()
        left = (self._budget - arena.capacity_bytes) // GRAIN * GRAIN
        if left < size:
            return False
        try:
            arena.grow(min(left, max(size, _CHUNK, arena.capacity_bytes)))
        except HostMemoryError:
            self._budget = arena.capacity_bytes  # do not ask the system for more again
            raise
        return True

    def _no_room(self, arena: Arena, size: int) -> HostMemoryError:
        assert self._budget is not None
        return HostMemoryError(
            f"no room to swap {format_bytes(size)} to the host: {format_bytes(arena.used_bytes)} "
            f"of the host budget of {format_bytes(self._budget)} are in use",
            hint="give the valve more host memory: memfit.pressure(host_budget=...)",
        )
