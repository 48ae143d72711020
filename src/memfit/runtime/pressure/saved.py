"""What autograd holds in the place of a saved tensor that a valve may move."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol

import torch

from memfit.runtime.swap.moved import Geometry, Moved


@dataclass(slots=True)
class Remains:
    """What a storage leaves behind when autograd needs it no more."""

    number: int
    bytes: int
    moved: Moved | None
    leaving: bool


class Undertaker(Protocol):
    """Puts away what storages leave behind; `counts` is whether it wants to know of each."""

    counts: bool

    def bury(self, remains: Remains) -> None: ...


class Saved:
    """One storage that the backward needs, and the first tensor that was saved from it.

    It dies with the last node of the graph that needs it. `tensor` is None while it is away or on
    its way back. `moved` is there from when it leaves until it is back; one that was asked for
    before its memory was let go has both. `final` is the version it left with.
    """

    __slots__ = (
        "__weakref__",
        "bytes",
        "final",
        "geometry",
        "leaving",
        "moved",
        "number",
        "tensor",
        "undertaker",
        "version",
    )

    def __init__(
        self, tensor: torch.Tensor, number: int, size: int, undertaker: Undertaker
    ) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.number = number
        self.bytes = size
        self.version = tensor._version
        self.final: int | None = None
        self.geometry: Geometry | None = None
        self.moved: Moved | None = None
        self.leaving = False
        self.undertaker = undertaker

    def __del__(self) -> None:
        if sys.is_finalizing() or (self.moved is None and not self.undertaker.counts):
            return  # plain memory goes by itself
        moved, self.moved = self.moved, None
        remains = Remains(self.number, self.bytes, moved, self.leaving)
        del moved  # the remains alone hold it
        self.undertaker.bury(remains)

    def current_version(self) -> int:
        """Which of its in-place changes its content has seen."""
        if self.final is not None:
            return self.final
        assert self.tensor is not None
        return self.tensor._version


class View:
    """Another tensor that was saved from the same storage."""

    __slots__ = ("geometry", "saved", "version")

    def __init__(self, saved: Saved, tensor: torch.Tensor) -> None:
        self.saved = saved
        self.geometry = Geometry.of(tensor)
        self.version = saved.current_version()
