"""Timeline: the bytes of a step from start to end, split by category."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.ir.step_graph import CATEGORIES


@dataclass(frozen=True)
class Point:
    """The bytes at one moment; `where` names the phase and the segment call."""

    position: int
    where: str
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        """All categories together."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Timeline:
    """Bytes against time. `peak` is one of the points, with its categories."""

    points: tuple[Point, ...]
    peak: Point

    @property
    def peak_bytes(self) -> int:
        """The highest total of the step."""
        return self.peak.total

    @property
    def peak_categories(self) -> dict[str, int]:
        """The peak split by category; sums to `peak_bytes`."""
        return {name: self.peak.bytes.get(name, 0) for name in CATEGORIES}
