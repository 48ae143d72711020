"""Replay: one step over time, tensor by tensor and on its tracks, as the simulator sees it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from memfit.ir.step_graph import CATEGORIES

COMPUTE, COPY_OUT, COPY_IN = TRACKS = ("compute", "copy-out", "copy-in")


@dataclass(frozen=True)
class LiveTensor:
    """A piece of memory that is alive at positions start <= p < end, and where it comes from.

    `module` is the path of the module that makes it, `source` the line of code behind it; either is
    empty where it is not known.
    """

    name: str
    category: str
    bytes: int
    start: int
    end: int
    module: str = ""
    source: str = ""
    shape: str = ""
    file: str = ""  # of the source
    line: int = 0


@dataclass(frozen=True)
class Work:
    """One stretch of a track: "forward", "backward", "recompute", "copy" or "other"."""

    track: str
    kind: str
    name: str
    start_s: float
    end_s: float
    bytes: int = 0  # that a copy moves


class Knot(NamedTuple):
    """A position of the step and when it begins."""

    position: int
    seconds: float


@dataclass(frozen=True)
class Replay:
    """The tensors of a step at every position, and the positions on the clock.

    At each position the tensors alive sum to the simulated bytes, moments inside segments included.
    Between two knots the clock runs evenly; `places` names the phase and the segment call from a
    position on.
    """

    length: int
    tensors: tuple[LiveTensor, ...]
    clock: tuple[Knot, ...]
    work: tuple[Work, ...]
    places: tuple[tuple[int, str], ...]

    @property
    def seconds(self) -> float:
        """How long the step takes."""
        return self.clock[-1].seconds

    @cached_property
    def curves(self) -> dict[str, list[int]]:
        """Bytes of each category at every position."""
        change = {name: [0] * (self.length + 1) for name in CATEGORIES}
        for tensor in self.tensors:
            change[tensor.category][tensor.start] += tensor.bytes
            change[tensor.category][tensor.end] -= tensor.bytes
        return {name: list(accumulate(sizes[:-1])) for name, sizes in change.items()}

    @cached_property
    def totals(self) -> list[int]:
        """Bytes at every position."""
        return [sum(sizes) for sizes in zip(*self.curves.values(), strict=True)]

    @cached_property
    def peak_position(self) -> int:
        """The first position with the most bytes."""
        return self.totals.index(max(self.totals))

    @property
    def peak_bytes(self) -> int:
        """The most bytes of the step."""
        return self.totals[self.peak_position]

    @property
    def peak_categories(self) -> dict[str, int]:
        """The peak by category; sums to `peak_bytes`."""
        return {name: sizes[self.peak_position] for name, sizes in self.curves.items()}

    def alive(self, position: int) -> list[LiveTensor]:
        """The tensors alive at a position, largest first."""
        found = [t for t in self.tensors if t.start <= position < t.end]
        return sorted(found, key=lambda t: -t.bytes)

    def place(self, position: int) -> str:
        """The phase and the segment call of a position."""
        starts = [start for start, _ in self.places]
        return self.places[max(bisect_right(starts, position) - 1, 0)][1]

    def sampled(self, most: int) -> list[int]:
        """At most so many positions in their order: the highest of each equal stretch of time."""
        found: dict[int, int] = {}
        for position, total in enumerate(self.totals):
            stretch = min(int(self.times[position] / self.seconds * most), most - 1)
            if stretch not in found or total > self.totals[found[stretch]]:
                found[stretch] = position
        return [found[stretch] for stretch in sorted(found)]

    @cached_property
    def times(self) -> list[float]:
        """When each position begins."""
        return [self.seconds_at(position) for position in range(self.length)]

    def seconds_at(self, position: int) -> float:
        """When a position begins; the first of two knots there says so."""
        after = bisect_left(self._knot_positions, position)
        if after == 0 or self._knot_positions[after] == position:
            return self.clock[after].seconds
        return interpolate(self.clock[after - 1 : after + 1], position)

    @cached_property
    def _knot_positions(self) -> list[int]:
        return [knot.position for knot in self.clock]


def interpolate(knots: Sequence[tuple[float, float]], x: float) -> float:
    """The line through the knots at `x`; beyond its ends their values."""
    after = bisect_right([knot[0] for knot in knots], x)
    if after == 0 or after == len(knots):
        return knots[max(after - 1, 0)][1]
    (x0, y0), (x1, y1) = knots[after - 1], knots[after]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
