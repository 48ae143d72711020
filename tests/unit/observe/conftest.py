"""A counter whose memory is whatever a test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memfit.ir.memory_series import MB
from memfit.observe import memory as module
from memfit.observe.counters import Reading
from memfit.observe.memory import MemoryProfiler


class Tape:
    """Memory that tests set; its peak starts anew with every reading, as an allocator's does."""

    counts = "resident"
    unread_s = 0.0

    def __init__(self) -> None:
        self.readings = 0
        self.now = self.highest = 100
        self.retries = 0
        self.closed = 0

    def set(self, *megabytes: int) -> None:
        """Go through these values."""
        for value in megabytes:
            self.now, self.highest = value, max(self.highest, value)

    def open(self) -> int:
        self.highest = self.now
        return self.now * MB

    def take(self) -> Reading:
        reading = Reading(self.highest * MB, self.now * MB, 2 * self.highest * MB, self.retries)
        self.highest, self.retries = self.now, 0
        self.readings += 1
        return reading

    def capacity_bytes(self) -> int:
        return 1000 * MB

    def left_out(self) -> str | None:
        return None

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    """The memory that profilers see in a test."""
    tape = Tape()
    monkeypatch.setattr(module, "counter_for", lambda device, counts: tape)
    monkeypatch.setattr(module, "_at_work", {})
    return tape


@pytest.fixture
def profiler(tape: Tape) -> Callable[..., MemoryProfiler]:
    """Makes profilers of the tape."""

    def make(**options: Any) -> MemoryProfiler:
        return MemoryProfiler("cpu", **options)

    return make
