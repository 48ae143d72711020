"""When each position of a step comes: seconds of calls and copies, put on the step's positions.

A call that runs by another variant is one graph to the step: all of its seconds go to the position
of its peak. What the calls do not account for is shared among the phases of the step as they were
timed, and within each spread over the positions outside of calls by the bytes that are allocated
there: what makes large tensors takes long. Profiles of earlier versions have no seconds of phases:
there the bytes alone decide, and an optimizer that allocates nothing takes no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from memfit.ir.replay import COMPUTE, COPY_IN, COPY_OUT, Knot, Work, interpolate
from memfit.ir.step_graph import PHASES, Call, StepGraph
from memfit.planning.acts import Act, Pick, Send
from memfit.planning.simulate import Simulator
from memfit.planning.timetable import Stretch, timetable

OPTIMIZER = PHASES[-1]
WITH_SEGMENTS = ("forward", "backward")
LARGE = 2e-3  # of the bytes a phase allocates between calls: a position with more has its own knots
SHORT = 1e-9  # of the step: shorter stretches are rounding


class _Part(NamedTuple):
    """A stretch of work from `first` up to position `last`; `jump_s` of it at `first` alone."""

    kind: str
    call: Call
    first: int
    last: int
    stretch: Stretch
    jump_s: float


def backward_end(call: Call) -> int:
    """Where a call's backward is over: a captured one's when it returns."""
    return max(call.finish if call.finish >= 0 else call.done, call.need)


def phase_ends(graph: StepGraph) -> tuple[int, int, int]:
    """Where the segments' forwards end, the loss, and the backward; the optimizer comes last."""
    segments = max((call.exit for call in graph.calls), default=graph.model_end)
    return min(segments, graph.forward_end), graph.forward_end, graph.backward_end


def clock_and_work(
    sim: Simulator, acts: Sequence[Act], step_s: float
) -> tuple[tuple[Knot, ...], tuple[Work, ...]]:
    """The clock of a step of `step_s`, and what runs on its tracks."""
    table = timetable(sim, acts)
    parts = _parts(sim, acts, table.forward, table.backward)
    stretches = [*table.forward, *table.backward, *table.out, *table.back]
    busy_s = max((stretch.end_s for stretch in stretches), default=0.0)
    between_s = _between_seconds(sim)
    timed_s = busy_s + sum(between_s.values())
    scale = min(1.0, step_s / timed_s) if timed_s > 0 else 1.0
    between = _Between(sim.graph, parts, max(step_s - scale * busy_s, 0.0), between_s)
    knots, work = [Knot(0, 0.0)], list[Work]()
    lanes = [(0.0, 0.0)]  # seconds on the lanes -> seconds of the step
    now, position, lane = 0.0, 0, 0.0
    for part in parts:
        now = between.pass_by(position, part.first, now, knots, work)
        now += scale * (part.stretch.start_s - lane)  # waiting for a copy
        lanes.append((part.stretch.start_s, now))
        begun, now = now, now + scale * (part.stretch.end_s - part.stretch.start_s)
        jumped = min(begun + scale * part.jump_s, now)
        if part.jump_s:
            knots.append(Knot(min(part.first + 1, part.last), jumped))
        if part.kind == "recompute":
            work.append(Work(COMPUTE, "recompute", part.call.name, begun, jumped))
            begun = jumped
        kind = "forward" if part.kind == "forward" else "backward"
        work.append(Work(COMPUTE, kind, part.call.name, begun, now))
        knots.append(Knot(part.last, now))
        lanes.append((part.stretch.end_s, now))
        position, lane = part.last, part.stretch.end_s
    between.pass_by(position, sim.graph.length, now, knots, work)
    knots.append(Knot(sim.graph.length, step_s))
    if lane < busy_s:  # copies that nothing waits for
        lanes.append((busy_s, step_s))
    for track, copies in ((COPY_OUT, table.out), (COPY_IN, table.back)):
        for copy in copies:
            name = sim.graph.calls[copy.call].name
            begun = interpolate(lanes, copy.start_s)
            ended = begun + scale * (copy.end_s - copy.start_s)
            work.append(Work(track, "copy", name, begun, ended, copy.bytes))
    return tuple(knots), tuple(w for w in work if w.end_s - w.start_s > SHORT * step_s)


def _parts(
    sim: Simulator, acts: Sequence[Act], forward: list[Stretch], backward: list[Stretch]
) -> list[_Part]:
    """The work of the step in its order, on positions that do not overlap."""
    calls = sim.graph.calls
    picked = {act.call for act in acts if isinstance(act, Pick)}
    runs = [act for act in acts if not isinstance(act, Pick | Send)]
    again_s = {last: sim.seconds_of((first, last)) for first, last in runs}
    found: list[_Part] = []
    position = 0
    for stretch in forward:
        call = calls[stretch.call]
        first, last = max(call.enter, position), max(call.exit, position)
        jump_s = stretch.end_s - stretch.start_s if call.index in picked else 0.0
        found.append(_Part("forward", call, first, last, stretch, jump_s))
        position = last
    limits = [calls[stretch.call].need for stretch in backward[1:]] + [sim.graph.length]
    for stretch, limit in zip(backward, limits, strict=False):
        call = calls[stretch.call]
        first = max(call.need, position)
        last = max(min(backward_end(call), limit), first)
        kind, jump_s = "backward", 0.0
        if call.index in picked:
            jump_s = stretch.end_s - stretch.start_s
        elif call.index in again_s:
            kind, jump_s = "recompute", again_s[call.index] / sim.profile.passes
        found.append(_Part(kind, call, first, last, stretch, jump_s))
        position = last
    return found


def _between_seconds(sim: Simulator) -> dict[str, float]:
    """Seconds outside of calls in one pass, by phase: the optimizer steps once for all passes."""
    passes = sim.profile.passes
    return {
        phase: seconds / passes if phase == OPTIMIZER else seconds
        for phase, seconds in sim.profile.between_s.items()
    }


class _Between:
    """Seconds of the positions outside all parts: `rest_s` together, shared as `between_s` is."""

    def __init__(
        self,
        graph: StepGraph,
        parts: Sequence[_Part],
        rest_s: float,
        between_s: Mapping[str, float],
    ) -> None:
        self.weights = [1.0] * graph.length  # a byte for those where nothing is allocated
        for block in graph.blocks:
            if block.birth < graph.length:
                self.weights[block.birth] += block.bytes
        for part in parts:
            self.weights[part.first : part.last] = [0.0] * (part.last - part.first)
        self.phases = list(pairwise((0, *phase_ends(graph), graph.length)))
        totals = [sum(self.weights[start:end]) for start, end in self.phases]
        # A phase without positions of its own has nowhere to stand.
        shares = [
            between_s.get(name, 0.0) if t else 0.0 for name, t in zip(PHASES, totals, strict=True)
        ]
        shares = shares if any(shares) else totals
        unit_s = rest_s / sum(shares) if any(shares) else 0.0
        self.paces = [unit_s * s / t if t else 0.0 for s, t in zip(shares, totals, strict=True)]
        self.large = [t * LARGE for t in totals]
        self.least_s = SHORT * rest_s

    def pass_by(
        self, first: int, last: int, now: float, knots: list[Knot], work: list[Work]
    ) -> float:
        """Add knots and work of the positions from `first` to `last`; return when they are over."""
        for phase, (start, end) in enumerate(self.phases):
            begun, since, until = now, max(first, start), min(last, end)
            for knot in self._knots(phase, since, until, begun) if since < until else ():
                knots.append(knot)
                now = knot.seconds
            name = PHASES[phase]
            words = f"{name}, between segments" if name in WITH_SEGMENTS else name
            if now - begun > self.least_s:
                work.append(Work(COMPUTE, "other", words, begun, now))
        knots.append(Knot(last, now))
        return now

    def _knots(self, phase: int, first: int, last: int, now: float) -> Iterator[Knot]:
        """When positions of a phase begin, from `first` at `now` on: large ones, and the end."""
        large, pace_s = self.large[phase], self.paces[phase]
        for position in range(first, last):
            weight = self.weights[position]
            if weight > large:
                yield Knot(position, now)
            now += pace_s * weight
            if weight > large and position + 1 < last:
                yield Knot(position + 1, now)
        yield Knot(last, now)
