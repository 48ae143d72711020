"""Where names stand in a chart: near their points, on nothing else, and none left out.

Names are placed one after the other, each where it costs least of the places around its point:
what it would cover weighs most, then how far away it is. So the first ones have the best places,
and one that has no free place still has the least bad one. Not the best placement of all names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

XY = tuple[float, float]
_POINT = 6.0  # pixels around a point that no name stands on
_RINGS = (11.0, 18.0, 28.0, 40.0, 54.0, 70.0, 90.0, 115.0, 150.0, 190.0)  # from a point to its name
_NEAR = 20.0  # a name farther away, or as near to another point, has a line to its own
_DIRECTIONS = 16
_FAR_AWAY = 0.01  # what a pixel of distance costs, beside
_OUTSIDE, _ON_NAME, _ON_POINT, _CROSSING, _OF_ANOTHER, _ON_LINE = 100.0, 20.0, 10.0, 4.0, 2.0, 1.0


class Box(NamedTuple):
    """A rectangle in pixels."""

    x0: float
    y0: float
    x1: float
    y1: float

    def overlap(self, other: Box) -> float:
        """How much they share, in square pixels."""
        across = min(self.x1, other.x1) - max(self.x0, other.x0)
        up = min(self.y1, other.y1) - max(self.y0, other.y0)
        return across * up if across > 0 and up > 0 else 0.0

    def has(self, point: XY) -> bool:
        """Whether the point lies in it."""
        return self.x0 < point[0] < self.x1 and self.y0 < point[1] < self.y1

    def inner(self, pixels: float) -> Box:
        """The same, this much less at every side."""
        return Box(self.x0 + pixels, self.y0 + pixels, self.x1 - pixels, self.y1 - pixels)

    @property
    def area(self) -> float:
        """Square pixels."""
        return (self.x1 - self.x0) * (self.y1 - self.y0)


class Place(NamedTuple):
    """Where a name stands, and the line from its point to it, if it stands far away."""

    box: Box
    leader: XY | None  # the end of that line


def place_names(
    names: Sequence[tuple[XY, XY]], points: Sequence[XY], line: Sequence[XY], frame: Box
) -> list[Place]:
    """A place for every name, given as its point and its size; those that come first choose first.

    No name stands on a point or, if there is room, on the line; all stand within the frame.
    """
    marks = [Box(x - _POINT, y - _POINT, x + _POINT, y + _POINT) for x, y in points]
    beads = list(_along(line))
    taken: list[Box] = []
    leaders: list[XY] = []
    found: list[Place] = []
    for point, size in names:
        best, least = Place(_beside(point, size, 0.0, _RINGS[0]), None), math.inf
        for ring, direction in _around():
            cost = ring * _FAR_AWAY
            if cost >= least:
                break  # no place farther away costs less
            box = _beside(point, size, direction, ring)
            end = _nearest(box, point)
            away = math.dist(end, point)
            others = (math.dist(_nearest(box, p), p) for p in points if p != point)
            unclear = any(distance < away + 4 for distance in others)
            far = away > _NEAR or unclear
            cost += _OUTSIDE * (1 - box.overlap(frame) / box.area)
            cost += _ON_NAME * sum(_share(box, other) for other in taken)
            cost += _ON_POINT * sum(_share(box, mark) for mark in marks)
            cost += _OF_ANOTHER * unclear
            if cost >= least:
                continue
            drawn = list(_along([point, end])) if far else []
            cost += _CROSSING * sum(any(other.has(p) for p in drawn) for other in taken)
            cost += _ON_LINE * any(box.has(p) for p in beads)
            cost += _CROSSING * any(box.has(p) for p in leaders)
            if cost < least:
                best, least = Place(box, end if far else None), cost
        taken.append(best.box)
        if best.leader is not None:
            leaders += _along([point, best.leader])
        found.append(best)
    return found


def broken(name: str, width: int) -> str:
    """The name in lines of at most `width` characters, if it has spaces or a + to break at."""
    lines = [""]
    for piece in re.split(r"(?= )|(?<!=)(?=\+)", name):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append(piece.lstrip())
        else:
            lines[-1] += piece
    return "\n".join(lines)


def _around() -> Iterator[tuple[float, float]]:
    """Rings and directions; the right side first."""
    for ring in _RINGS:
        for step in range(_DIRECTIONS):
            yield ring, 2 * math.pi * step / _DIRECTIONS


def _beside(point: XY, size: XY, direction: float, ring: float) -> Box:
    """The box that has its edge at the ring in this direction."""
    along, up = math.cos(direction), math.sin(direction)
    x = point[0] + along * ring - size[0] / 2 * (1 - max(-1.0, min(1.0, 2 * along)))
    y = point[1] + up * ring - size[1] / 2 * (1 - up)
    return Box(x, y, x + size[0], y + size[1])


def _nearest(box: Box, point: XY) -> XY:
    """The point of the box that is nearest."""
    return min(max(point[0], box.x0), box.x1), min(max(point[1], box.y0), box.y1)


def _share(box: Box, other: Box) -> float:
    """What they share of the smaller one, and some more for touching at all."""
    shared = box.overlap(other)
    return 0.5 + shared / min(box.area, other.area) if shared else 0.0


def _along(line: Sequence[XY], every: float = 4.0) -> Iterator[XY]:
    """Points on a line, every few pixels."""
    for (x0, y0), (x1, y1) in pairwise(line):
        count = max(int(math.dist((x0, y0), (x1, y1)) / every), 1)
        for step in range(count + 1):
            part = step / count
            yield x0 + part * (x1 - x0), y0 + part * (y1 - y0)
