"""A phase of a step while it is being measured."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.ir.memory_series import Snapshot
from memfit.observe.counters import Reading


@dataclass(slots=True, eq=False)
class Record:
    """Readings and seconds of one phase of one step, added up as they come."""

    step: int
    phase: str
    reading: Reading | None = None
    seconds: float = 0.0

    def add(self, reading: Reading) -> None:
        """Add a reading of a later time."""
        self.reading = reading if self.reading is None else self.reading | reading

    def add_seconds(self, seconds: float) -> None:
        """Add the seconds of one of its times."""
        self.seconds += seconds

    def snapshot(self, timed: bool) -> Snapshot:
        """The phase as data, with its seconds if they were taken."""
        assert self.reading is not None, f"phase {self.phase!r} was never read"
        return Snapshot(
            step=self.step,
            phase=self.phase,
            used_bytes=self.reading.highest_bytes,
            final_bytes=self.reading.final_bytes,
            held_bytes=self.reading.held_bytes,
            retries=self.reading.retries,
            split_bytes=self.reading.split_bytes,
            seconds=self.seconds if timed else None,
        )
