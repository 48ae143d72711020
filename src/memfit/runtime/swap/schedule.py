"""What moves in one step, and the points of the step at which it goes and comes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.runtime.swap.moved import Moved

_Points = dict[int, list["weakref.ref[Moved]"]]


class Step:
    """One step: it knows its moved memory, but only what autograd keeps alive."""

    def __init__(self) -> None:
        self.complete = False  # the model's forward came to its end
        self.begun = False  # the backward asked for something
        self._lock = threading.Lock()
        self._releases: _Points = {}
        self._prefetches: _Points = {}
        # By the address of the storage, which the weak reference keeps from being used again.
        self._known: dict[int, tuple[StorageWeakRef, list[weakref.ref[Moved]]]] = {}

    def find(self, tensor: torch.Tensor) -> Moved | None:
        """The memory that moved already for another tensor over the same storage."""
        storage = tensor.untyped_storage()
        for moved in _living(self._known.get(storage._cdata, (None, []))[1]):
            if moved.is_of(tensor):
                return moved
        return None

    def add(self, moved: Moved, release: int) -> None:
        """Take in memory that starts to move."""
        assert moved.storage is not None
        reference = weakref.ref(moved)
        key = moved.storage._cdata
        if key not in self._known:
            self._known[key] = StorageWeakRef(moved.storage), []
        self._known[key][1].append(reference)
        self._releases.setdefault(release, []).append(reference)

    def wanted(self, moved: Moved, prefetch: int) -> None:
        """Say where its copy back begins; the earliest of several points in backward counts."""
        self._prefetches.setdefault(prefetch, []).append(weakref.ref(moved))

    def due_releases(self, index: int) -> list[Moved]:
        """What goes when the forward of call `index` starts, in the order it was moved."""
        points = sorted(point for point in self._releases if point <= index)
        return [moved for point in points for moved in _living(self._releases.pop(point))]

    def due_prefetches(self, index: int) -> list[Moved]:
        """What comes when the backward of call `index` starts, last moved first."""
        with self._lock:  # the backwards of two devices run at once
            points = sorted((p for p in self._prefetches if p >= index), reverse=True)
            return [m for p in points for m in _living(reversed(self._prefetches.pop(p)))]

    def living(self) -> list[Moved]:
        """All that autograd still holds."""
        return [moved for _, moveds in self._known.values() for moved in _living(moveds)]


def _living(references: Iterable[weakref.ref[Moved]]) -> Iterator[Moved]:
    for reference in references:
        moved = reference()
        if moved is not None:
            yield moved
