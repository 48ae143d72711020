"""The blocks of a traced step, and the bytes they take together at every moment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """One storage, alive at moments `birth` to `death` - 1.

    Segment calls in `savers` keep it for backward, those in `inputs` are given it. -1 is what is
    outside of segments.
    """

    bytes: int
    birth: int
    category: str
    origin: str
    death: int = -1
    inputs: set[int] = field(default_factory=set)
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

    def at(self, run: range) -> npt.NDArray[np.bool_]:
        """The moments at which a segment call of this run is at work."""
        return (self._segments >= run.start) & (self._segments < run.stop)

    @cached_property
    def _segments(self) -> npt.NDArray[np.int64]:
        return np.array([moment.segment for moment in self.moments])

    def in_phases(self, phases: Iterable[str]) -> npt.NDArray[np.bool_]:
        """The moments of these phases."""
        wanted = set(phases)
        return np.array([moment.phase in wanted for moment in self.moments])

    def recomputed(self, runs: Sequence[range]) -> Curve:
        """Bytes when every run of segment calls drops what it saved, and makes it anew at once.

        What enters a run stays, and so does what code outside of segments saved.
        """
        curve = self.total.copy()
        for run, dropped in self._dropped_by_run(runs).items():
            curve -= np.where(self.at(run), 0, self.curve(dropped))
        return curve

    def saved_bytes(self, segment: int) -> int:
        """What one segment call keeps for its backward."""
        return sum(block.bytes for block in self.blocks if segment in block.savers)

    def _dropped_by_run(self, runs: Sequence[range]) -> dict[range, list[Block]]:
        run_of = {segment: run for run in runs for segment in run}
        dropped: dict[range, list[Block]] = {}
        for block in self.blocks:
            if block.category == "activations" and -1 not in block.savers:
                run = run_of[min(block.savers)]
                if not block.inputs or self._handed_on_inside(block, run):
                    dropped.setdefault(run, []).append(block)
        return dropped

    def _handed_on_inside(self, block: Block, run: range) -> bool:
        """Whether a call of this run makes it for the next one in the run, and for no other."""
        maker = self.moments[block.birth].segment
        alone = maker in run and block.inputs == {maker + 1}
        return alone and all(call in run for call in (*block.inputs, *block.savers))
