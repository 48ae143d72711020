"""Seconds of each segment call: forward, backward, and its replay."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.measure.timing import Clock


@dataclass
class CallClock:
    """Collects moments of one step; `read` turns them into seconds per call."""

    clock: Clock
    forward: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    replay: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    host: dict[int, float] = field(default_factory=dict)
    backward: list[tuple[int, Any]] = field(default_factory=list)
    end: Any = None

    def watch_backward(self, index: int, output: Any) -> None:
        """Note when the gradient of the call's output arrives."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self.backward.append((index, self.clock.now())))
                return

    def read(self) -> dict[str, dict[int, float]]:
        """Seconds per call of "forward", "backward", "replay" and of the "host" in replays."""
        seconds = self.clock.seconds
        starts: dict[int, Any] = {}
        for index, moment in self.backward:
            starts.setdefault(index, moment)
        order = list(starts.items())
        ends = [moment for _, moment in order[1:]] + [self.end]
        return {
            "forward": {i: seconds(a, b) for i, (a, b) in self.forward.items()},
            "replay": {i: seconds(a, b) for i, (a, b) in self.replay.items()},
            "host": self.host,
            "backward": {
                i: seconds(start, end) for (i, start), end in zip(order, ends, strict=True)
            },
        }


def medians(readings: Sequence[dict[int, float]], alike: Sequence[int]) -> list[float]:
    """Median seconds per call over readings and over calls that are alike."""
    pooled: dict[int, list[float]] = {}
    for reading in readings:
        for index, value in reading.items():
            pooled.setdefault(alike[index], []).append(value)
    middle = {group: statistics.median(values) for group, values in pooled.items()}
    return [middle.get(group, 0.0) for group in alike]
