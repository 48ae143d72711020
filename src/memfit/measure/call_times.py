"""Seconds of each segment call: forward, backward, and its replay."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.ir.step_graph import PHASES
from memfit.measure.timing import Clock


@dataclass
class CallClock:
    """Collects moments of one step; `read` turns them into seconds per call.

    `begun` are the moments at which the phases of the step begin, as `run_step` names them.
    """

    clock: Clock
    forward: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    replay: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    host: dict[int, float] = field(default_factory=dict)
    backward: list[tuple[int, Any]] = field(default_factory=list)
    begun: dict[str, Any] = field(default_factory=dict)

    def phase_begins(self, name: str) -> None:
        """Note when a phase begins; of several passes the last one's."""
        if name == "forward":
            self.backward.clear()
        self.begun[name] = self.clock.now()

    def watch_backward(self, index: int, output: Any) -> None:
        """Note when the gradient of the call's output arrives."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self.backward.append((index, self.clock.now())))
                return

    def read(self) -> dict[str, dict[int, float]]:
        """Seconds per call of "forward", "backward", "replay" and of the "host" in replays.

        "between" are those outside of calls, by the number of the phase in PHASES.
        """
        seconds = self.clock.seconds
        starts: dict[int, Any] = {}
        for index, moment in self.backward:
            starts.setdefault(index, moment)
        order = list(starts.items())
        ends = [moment for _, moment in order[1:]] + [self.begun["optimizer"]]
        return {
            "forward": {i: seconds(a, b) for i, (a, b) in self.forward.items()},
            "replay": {i: seconds(a, b) for i, (a, b) in self.replay.items()},
            "host": self.host,
            "backward": {
                i: seconds(start, end) for (i, start), end in zip(order, ends, strict=True)
            },
            "between": dict(enumerate(self._between([moment for _, moment in order]))),
        }

    def _between(self, backward: Sequence[Any]) -> list[float]:
        """Seconds outside of calls in each of PHASES; `backward` are moments at which calls' begin.

        A call's backward lasts until the next one's: in between is what comes before the first.
        """
        seconds, begun = self.clock.seconds, self.begun
        if not self.forward or len(begun) < len(PHASES):
            return []
        called = list(self.forward.values())
        inside_s = sum(seconds(start, end) for start, end in called)
        first = backward[0] if backward else begun["optimizer"]
        found = (
            seconds(begun["forward"], called[-1][1]) - inside_s,
            seconds(called[-1][1], begun["backward"]),
            seconds(begun["backward"], first),
            seconds(begun["optimizer"], begun["end"]),
        )
        return [max(s, 0.0) for s in found]


def medians(readings: Sequence[dict[int, float]], alike: Sequence[int]) -> list[float]:
    """Median seconds per call over readings and over calls that are alike."""
    pooled: dict[int, list[float]] = {}
    for reading in readings:
        for index, value in reading.items():
            pooled.setdefault(alike[index], []).append(value)
    middle = {group: statistics.median(values) for group, values in pooled.items()}
    return [middle.get(group, 0.0) for group in alike]
