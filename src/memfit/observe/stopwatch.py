"""Seconds between moments of a loop, read when the device has passed them: nothing waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from memfit.measure.timing import Clock

Told = Callable[[float], None]


class Stopwatch:
    """Tells how long things took, in order, as soon as the device's own timeline says it."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._behind = device.type == "cuda"  # whether the device runs behind the host
        self._waiting: deque[tuple[Any, Any, Told]] = deque()
        self._last: Any = None

    def start(self) -> None:
        """Take the first moment."""
        self._last = self._clock.now()

    def lap(self, told: Told) -> None:
        """Take a moment; `told` will be called with the seconds since the one before."""
        assert self._last is not None, "a stopwatch is read before it was started"
        now = self._clock.now()
        if self._behind:
            self._waiting.append((self._last, now, told))
        else:
            told(self._clock.seconds(self._last, now))
        self._last = now

    def collect(self) -> None:
        """Tell what the device has passed by now."""
        while self._waiting and self._waiting[0][1].query():
            self._tell()

    def settle(self) -> None:
        """Wait for the device and tell everything."""
        if self._waiting:
            self._waiting[-1][1].synchronize()
        while self._waiting:
            self._tell()

    def _tell(self) -> None:
        start, stop, told = self._waiting.popleft()
        told(self._clock.seconds(start, stop))
