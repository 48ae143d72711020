"""The blocks of a traced step, and the bytes they take together at every moment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.ir.step_graph import CATEGORIES

Curve = npt.NDArray[np.int64]  # bytes at every moment


class Moment(NamedTuple):
    """One operator of the step: its phase, and the segment call at work (-1: none)."""

    phase: str
    segment: int


@dataclass
class Block:
    """One storage, alive at moments `birth` to `death` - 1; `savers` keep it for backward."""

    bytes: int
    birth: int
    category: str
    origin: str
    death: int = -1
    segment_input: bool = False
    savers: set[int] = field(default_factory=set)


class History:
    """A traced step."""

    def __init__(self, blocks: list[Block], moments: list[Moment]) -> None:
        self.blocks = blocks
        self.moments = moments

    @cached_property
    def categories(self) -> dict[str, Curve]:
        """Bytes at every moment, by category."""
        return {
            name: self.curve(block for block in self.blocks if block.category == name)
            for name in CATEGORIES
        }

    @cached_property
    def total(self) -> Curve:
        """Bytes at every moment."""
        return self.curve(self.blocks)

    def curve(self, blocks: Iterable[Block]) -> Curve:
        """Bytes of these blocks at every moment."""
        changes = np.zeros(len(self.moments) + 1, dtype=np.int64)
        for block in blocks:
            changes[block.birth] += block.bytes
            changes[block.death] -= block.bytes
        return np.cumsum(changes[:-1])

    def at(self, segment: int) -> npt.NDArray[np.bool_]:
        """The moments at which a segment call is at work."""
        return np.array([moment.segment == segment for moment in self.moments])

    def in_phases(self, phases: Iterable[str]) -> npt.NDArray[np.bool_]:
        """The moments of these phases."""
        wanted = set(phases)
        return np.array([moment.phase in wanted for moment in self.moments])

    @cached_property
    def recomputed(self) -> Curve:
        """Bytes when every segment call drops what it saved and makes it anew for its backward.

        Inputs of segments stay, and so does what code outside of segments saved.
        """
        curve = self.total.copy()
        for segment, dropped in self._dropped_by_segment().items():
            curve -= np.where(self.at(segment), 0, self.curve(dropped))
        return curve

    def saved_bytes(self, segment: int) -> int:
        """What one segment call keeps for its backward."""
        return sum(block.bytes for block in self.blocks if segment in block.savers)

    def _dropped_by_segment(self) -> dict[int, list[Block]]:
        dropped: dict[int, list[Block]] = {}
        for block in self.blocks:
            if block.category == "activations" and not block.segment_input:
                if -1 not in block.savers:
                    dropped.setdefault(min(block.savers), []).append(block)
        return dropped
