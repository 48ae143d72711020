"""The most bytes of a step while each of its segment calls runs."""

from __future__ import annotations

from typing import NamedTuple

from memfit.ir.step_graph import StepGraph
from memfit.ir.timeline import Timeline
from memfit.planning.clock import backward_end


class CallPeaks(NamedTuple):
    """The step's most bytes in one call's forward and backward; None: it has no such pass."""

    forward_bytes: int | None
    backward_bytes: int | None


def call_peaks(graph: StepGraph, timeline: Timeline) -> list[CallPeaks]:
    """The peaks of every call, in the order of the calls."""
    totals = [0] * graph.length
    for point in timeline.points:
        totals[point.position] = max(totals[point.position], point.total)
    return [
        CallPeaks(
            max(totals[call.enter : call.exit], default=None),
            max(totals[call.need : backward_end(call)], default=None) if call.need >= 0 else None,
        )
        for call in graph.calls
    ]
