"""What moves in one step, and the points of the step at which it goes and comes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.runtime.swap.moved import Counter, Moved
from memfit.runtime.swap.storages import StorageSet

_NO_BACKWARD = -1
_Points = dict[int, list["weakref.ref[Moved]"]]


class _Walk:
    """A backward. Only torch holds it, until that backward is over, whatever its end."""

    __slots__ = ("__weakref__", "task")

    def __init__(self, task: int) -> None:
        self.task = task


class Step:
    """One step: it knows its moved memory, but only what autograd keeps alive."""

    def __init__(self) -> None:
        self.complete = False  # the model's forward came to its end
        self.stays = StorageSet()  # what there was no room for
        self.refused_bytes = float("inf")  # the smallest of that
        self._walk: weakref.ref[_Walk] | None = None  # the latest, until it comes to its end
        self._task: int | None = None  # that walk's
        self._lock = threading.Lock()
        self._releases: _Points = {}
        self._prefetches: _Points = {}
        # By the address of the storage, which the weak reference keeps from being used again.
        self._known: dict[int, tuple[StorageWeakRef, list[weakref.ref[Moved]]]] = {}

    @property
    def failed(self) -> bool:
        """Whether the latest backward is over and did not come to its end."""
        return self._walk is not None and self._walk() is None

    def walked(self) -> None:
        """Take note that a backward came here, if one is under way."""
        task = torch._C._current_graph_task_id()
        if task in (self._task, _NO_BACKWARD):
            return
        walk = _Walk(task)
        self._task, self._walk = task, weakref.ref(walk)
        engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        engine.queue_callback(partial(self._ended, walk))  # not called where it fails

    def _ended(self, walk: _Walk) -> None:
        if walk.task == self._task:
            self._task = self._walk = None

    def find(self, tensor: torch.Tensor) -> tuple[Moved, Counter] | None:
        """What moved already for another tensor over the same storage, and their counter."""
        for moved in self._over(tensor.untyped_storage()):
            counter = moved.counter_of(tensor)
            if counter is not None:
                return moved, counter
        return None

    def returned(self, tensor: torch.Tensor) -> None:
        """Take note of what a compiled call returned: memory that it saved has this content.

        Its code changes nothing after it saved. Torch may return an alias that counts apart.
        """
        if self.find(tensor) is None:
            for moved in self._over(tensor.untyped_storage()):
                if moved.leaving and not moved.changed:
                    moved.counters.append(Counter(tensor))

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

    def _over(self, storage: torch.UntypedStorage) -> Iterator[Moved]:
        return _living(self._known.get(storage._cdata, (None, []))[1])

    def living(self) -> list[Moved]:
        """All that autograd still holds."""
        return [moved for _, moveds in self._known.values() for moved in _living(moveds)]


def _living(references: Iterable[weakref.ref[Moved]]) -> Iterator[Moved]:
    for reference in references:
        moved = reference()
        if moved is not None:
            yield moved
