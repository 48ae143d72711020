"""One piece of device memory on its way to the host and back, and what autograd holds of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memfit.runtime.swap.arena import Slot
from memfit.runtime.swap.lanes import Copy
from memfit.runtime.swap.storages import same_counter

if TYPE_CHECKING:
    from memfit.runtime.swap.mover import Mover


class Counter:
    """A version counter over memory that moves, as it stood when a tensor was saved.

    `alias` shares it, and the memory until that is let go.
    """

    __slots__ = ("alias", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.alias = tensor.detach()  # without the graph, which would hold itself alive
        self.version = tensor._version

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor over the same storage counts here, and did not change since."""
        return self.version == tensor._version and same_counter(self.alias, tensor)

    def let_go(self) -> None:
        """Hold the memory no longer: only the counter stays."""
        self.alias.data = torch.empty(0, dtype=self.alias.dtype, device=self.alias.device)


class Moved:
    """The memory of one storage, in one version.

    leaving   the memory is still there, `copy` takes it to the slot
    away      only the slot has it
    returning new memory, which `copy` fills; the slot is free for copies after that
    here      the new memory is filled

    The first of its counters is that of the saved tensor. What a compiled call returns may have
    another one than what it saves of the same memory.
    """

    __slots__ = (
        "__weakref__",
        "copy",
        "counters",
        "lost",
        "mover",
        "size",
        "slot",
        "stayed",
        "step",
        "storage",
    )

    def __init__(self, mover: Mover, tensor: torch.Tensor, step: Any) -> None:
        self.mover = mover
        self.step = step  # is told of backwards that ask for a tensor
        self.counters = [Counter(tensor)]
        self.storage: torch.UntypedStorage | None = tensor.untyped_storage()
        self.size = self.storage.nbytes()
        self.slot: Slot | None = None
        self.copy: Copy | None = None
        self.lost = self.stayed = False

    @property
    def leaving(self) -> bool:
        """Whether the memory it came with is still there."""
        return self.storage is not None and self.slot is not None

    @property
    def here(self) -> bool:
        """Whether it came back and nothing is left to do for it."""
        return self.storage is not None and self.slot is None and self.copy is None

    @property
    def changed(self) -> bool:
        """Whether the memory was changed in place since it was saved."""
        return any(counter.version != counter.alias._version for counter in self.counters)

    def counter_of(self, tensor: torch.Tensor) -> Counter | None:
        """The counter of a tensor with the same storage whose content it has; None: of another."""
        return next((counter for counter in self.counters if counter.is_of(tensor)), None)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.mover.bury(self)


class Geometry(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    offset: int
    size: Sequence[int]
    stride: Sequence[int]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """That of a tensor."""
        return cls(tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def in_(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor that lies so in `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor: torch.Tensor = empty.set_(storage, self.offset, self.size, self.stride)  # type: ignore[call-overload]
        return tensor


class Handle:
    """What autograd keeps in the place of a saved tensor whose memory moves."""

    __slots__ = ("counter", "geometry", "moved")

    def __init__(self, moved: Moved, counter: Counter, tensor: torch.Tensor) -> None:
        self.moved, self.counter, self.geometry = moved, counter, Geometry.of(tensor)

    def tensor(self) -> torch.Tensor:
        """The saved tensor again."""
        moved, counter = self.moved, self.counter
        check_version(counter.version, counter.alias._version, self.geometry)
        moved.step.walked()
        return self.geometry.in_(moved.mover.fetch(moved))


class Kept:
    """What autograd keeps of a saved tensor that stays.

    Detached: an output that were kept as it is would hold its own graph alive. torch leaves the
    check of versions to hooks where there are any.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def tensor(self) -> torch.Tensor:
        """The saved tensor."""
        if self._tensor._version != self._version:
            check_version(self._version, self._tensor._version, Geometry.of(self._tensor))
        return self._tensor


def check_version(expected: int, current: int, geometry: Geometry) -> None:
    """Raise as autograd does for a tensor that was changed in place after it was saved.

    torch itself leaves the check out where hooks are at work.
    """
    if expected != current:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {list(geometry.size)} {geometry.dtype} is at version {current}; "
            f"expected version {expected} instead"
        )
