"""ComponentTimes: where the seconds of a training step go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memfit.ir.codec import to_data
from memfit.ir.swap import SwapStatistics

SCHEMA_VERSION = 1
COMPONENTS = ("loader", "forward", "backward", "recompute", "optimizer", "other")


@dataclass(frozen=True)
class SegmentTime:
    """Seconds of one segment call; `name` is "" for what lies outside all segments."""

    name: str
    forward_s: float
    backward_s: float
    recompute_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.forward_s + self.backward_s + self.recompute_s


@dataclass(frozen=True)
class CopyTime:
    """Copies to the host and back in one step: seconds of copying, and of waiting for them.

    Copies run beside the computation; what waits for them is part of forward and backward.
    """

    out_bytes: int
    out_s: float
    back_bytes: int
    back_s: float
    waited_s: float

    @staticmethod
    def between(before: SwapStatistics, after: SwapStatistics, steps: int) -> CopyTime:
        """One step's share of what was copied between two readings of an engine."""
        return CopyTime(
            out_bytes=(after.out.bytes - before.out.bytes) // steps,
            out_s=(after.out_busy_s - before.out_busy_s) / steps,
            back_bytes=(after.back.bytes - before.back.bytes) // steps,
            back_s=(after.in_busy_s - before.in_busy_s) / steps,
            waited_s=(after.stalled_s - before.stalled_s) / steps,
        )


@dataclass(frozen=True)
class ComponentTimes:
    """Means over the middle half of `steps` steps, each from a standing start and run to its end.

    `components` were taken on the device's own timeline, and are only those that could be told
    apart; `step_s` is the whole step by the host's clock. `recompute` says how recomputing was told
    from the rest of the backward. There are no `segments` where a step is launched as CUDA graphs.
    """

    workload: dict[str, str]
    device: str
    steps: int
    step_s: float
    step_spread_s: float
    components: dict[str, float]
    segments: tuple[SegmentTime, ...]
    recompute: str
    copies: CopyTime | None = None
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def accounted_share(self) -> float:
        """The sum of the components over the step that the host's clock saw; 1 is all of it."""
        return sum(self.components.values()) / self.step_s

    def to_json(self) -> dict[str, Any]:
        """Plain data, with what the components account for."""
        data: dict[str, Any] = to_data(self)
        data["accounted_share"] = self.accounted_share
        return {"schema_version": data.pop("schema_version"), **data}
