"""Copies to the host and back: when they run, what waits for them, and when memory comes and goes.

Each direction is one lane: copies run one after the other, beside the compute, in the order of the
calls that send them and of the backwards that want them back. What a call moves goes as one
bundle of equal parts, saved and wanted at equal times within the call: the first leaves while the
call still runs, and its backward begins when the first is back. A captured call has one part: it
saves everything when its forward ends, and wants all of it when its backward begins. Before the
forward named by the release point the compute waits for the bundle's last copy, and the memory is
free; the copies back start at the prefetch point, where the memory is taken. Limits: parts of a
call are not told apart, and calls follow each other without pause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from memfit.ir.profile import CopyRates, Profile
from memfit.ir.step_graph import StepGraph
from memfit.planning.acts import Act, Away, without_points

if TYPE_CHECKING:
    from memfit.planning.simulate import Simulator


@dataclass(frozen=True)
class CopyTimes:
    """Seconds that each lane copies, and that the compute waits for copies."""

    out_s: float = 0.0
    in_s: float = 0.0
    stall_s: float = 0.0

    @property
    def hidden_share(self) -> float:
        """How much of the copying nobody waits for."""
        busy_s = self.out_s + self.in_s
        return 1.0 if busy_s <= 0 else max(0.0, 1 - self.stall_s / busy_s)


class Stretch(NamedTuple):
    """The work or the copy of one call; `bytes` are those that are copied."""

    call: int
    start_s: float
    end_s: float
    bytes: int = 0


@dataclass
class Timetable:
    """What ran when on the lanes; gaps between stretches of work are waits for copies."""

    forward: list[Stretch] = field(default_factory=list)
    backward: list[Stretch] = field(default_factory=list)
    out: list[Stretch] = field(default_factory=list)
    back: list[Stretch] = field(default_factory=list)


class Copies:
    """The two lanes of one step."""

    def __init__(self, graph: StepGraph, profile: Profile, rates: CopyRates | None) -> None:
        self.graph, self.rates = graph, rates
        total_s = sum(t.forward_s + t.backward_s for t in profile.call_times)
        scale = min(1.0, profile.step_s / profile.passes / total_s) if total_s > 0 else 1.0
        self.forward_s = [scale * t.forward_s for t in profile.call_times]
        self.backward_s = [scale * t.backward_s for t in profile.call_times]
        needing = [call.index for call in graph.calls if call.need >= 0]
        self.order = sorted(needing, key=lambda c: graph.calls[c].need)  # of the backwards

    @property
    def overlap(self) -> bool:
        """Whether copies run beside the compute; if not, they cost their seconds as work does."""
        return self.rates is not None and self.rates.overlap

    def out_seconds(self, size: int, tensors: int) -> float:
        """Seconds of the lane to the host."""
        assert self.rates is not None
        return size / self.rates.out_bytes_per_s + tensors * self.rates.latency_s if size else 0.0

    def in_seconds(self, size: int, tensors: int) -> float:
        """Seconds of the lane to the device."""
        assert self.rates is not None
        return size / self.rates.in_bytes_per_s + tensors * self.rates.latency_s if size else 0.0

    def traffic(
        self,
        loads: Sequence[tuple[Away, int, int]],
        extra_s: Mapping[int, float],
        table: Timetable | None = None,
    ) -> CopyTimes:
        """Run the lanes. Loads are what is away, with its bytes each way; `extra_s` is what acts
        add to the backward of calls. What runs beside copies is written into a `table`."""
        if not loads and table is None:
            return CopyTimes()
        calls = len(self.graph.calls)
        out_s = {a.call: self.out_seconds(size, a.tensors) for a, size, _ in loads}
        in_s = {a.call: self.in_seconds(size, a.tensors) for a, _, size in loads}
        moments = {a.call: a.moments for a, _, _ in loads}
        busy = (sum(out_s.values()), sum(in_s.values()))
        if loads and not self.overlap:
            return CopyTimes(*busy)
        leaving: dict[int, list[int]] = {}
        coming: dict[int, list[int]] = {}
        for away, _, _ in loads:
            leaving.setdefault(away.release, []).append(away.call)
            coming.setdefault(away.prefetch, []).append(away.call)
        now = lane = stall_s = 0.0
        gone: dict[int, float] = {}
        for boundary in range(calls + 1):
            for call in leaving.get(boundary, ()):
                stall_s += max(gone[call] - now, 0.0)
                now = max(now, gone[call])
            if boundary < calls:
                begun, now = now, now + self.forward_s[boundary]
                if boundary in out_s:
                    work = _Bundle(begun, now, moments[boundary])
                    lane = gone[boundary] = work.copied(lane, out_s[boundary])
                if table is not None:
                    table.forward.append(Stretch(boundary, begun, now))
        back: dict[int, float] = {}
        lane = 0.0
        for boundary in (calls, *self.order):
            # Wanted first comes first.
            for call in sorted(coming.get(boundary, ()), key=lambda c: self.graph.calls[c].need):
                lane = back[call] = max(now, lane, gone[call]) + in_s[call]
            if boundary == calls:
                continue
            work_s = self.backward_s[boundary] + extra_s.get(boundary, 0.0)
            ended = now + work_s
            if boundary in in_s:
                # The same with time reversed: the last copy ends before the last part of the work.
                part = 1 / moments[boundary]
                first = back[boundary] - (1 - part) * in_s[boundary]
                ended = max(max(now, first) + work_s, back[boundary] + part * work_s)
                stall_s += max(ended - work_s - now, 0.0)
            if table is not None:
                table.backward.append(Stretch(boundary, ended - work_s, ended))
            now = ended
        if table is not None:
            for away, out, in_bytes in loads:
                ends = gone[away.call], back[away.call]
                table.out.append(Stretch(away.call, ends[0] - out_s[away.call], ends[0], out))
                table.back.append(Stretch(away.call, ends[1] - in_s[away.call], ends[1], in_bytes))
        return CopyTimes(*busy, stall_s)

    def scheduled(
        self,
        simulator: Simulator,
        acts: Sequence[Act],
        budget: int | None,
        unsure: float = 0.0,
    ) -> tuple[Act, ...]:
        """The acts with points: memory goes when its copy is done, or sooner where the budget has
        no room for it; it comes back as late as it can without a wait, or later likewise. Without a
        budget the peak stays what it would be without copies under way.

        Nothing waits either, where there is room, if the work before a point takes the share
        `unsure` less than it should."""
        tight = tuple(without_points(act) for act in acts)
        loads = simulator.loads(tight)
        if not loads:
            return tight
        curve = simulator.highest(tight)
        budget = int(curve.max()) if budget is None else budget
        room = budget - curve
        extra_s = simulator.added_seconds(tight)
        hides = float(self.overlap)  # a copy that nothing runs beside is over when it has begun
        unsure *= hides
        out = {
            a.call: _Load(size, hides * self.out_seconds(size, a.tensors), a.moments)
            for a, size, _ in loads
        }
        back = {
            a.call: _Load(size, hides * self.in_seconds(size, a.tensors), a.moments)
            for a, _, size in loads
        }
        calls, order = self.graph.calls, self.order
        forward = range(len(calls))
        ends = [c.enter for c in calls[1:]] + [self.graph.model_end]
        leaves = _points(
            [out.get(c, _Load()) for c in forward],
            self.forward_s,
            [_least(room, calls[c].enter, ends[c]) for c in forward],
            unsure,
        )
        # The way back is the same with time reversed; before the first backward lies the loss.
        mirrored = order[::-1]
        until = [calls[c].need for c in order[1:]] + [self.graph.backward_end]
        until_of = dict(zip(order, until, strict=True))
        first = calls[order[0]].need if order else self.graph.backward_end
        returns = _points(
            [*(back.get(c, _Load()) for c in mirrored), _Load()],
            [*(self.backward_s[c] + extra_s.get(c, 0.0) for c in mirrored), 0.0],
            [
                *(_least(room, calls[c].need, until_of[c]) for c in mirrored),
                _least(room, self.graph.model_end, first),
            ],
            unsure,
        )
        place = {c: i for i, c in enumerate(mirrored)}
        found: list[Act] = []
        for act in tight:
            if isinstance(act, tuple) or act.call not in out:
                found.append(act)
                continue
            at = returns[place[act.call]] - 1  # the mirrored call before whose backward it starts
            prefetch = mirrored[at] if at < len(mirrored) else len(calls)
            found.append(replace(act, release=leaves[act.call], prefetch=prefetch))
        if simulator.peak_bytes(found) > budget:
            return tight
        # Points are set direction by direction: the way back may begin too late for what a long way
        # out delays.
        waits_s = self.traffic(simulator.loads(found), extra_s).stall_s
        worse = waits_s > 0 and waits_s > self.traffic(loads, extra_s).stall_s
        return tight if worse else tuple(found)


def _least(room: np.ndarray, start: int, stop: int) -> float:
    """The least room at positions from `start` up to `stop`."""
    return float(room[start : max(stop, start + 1)].min())


class _Load(NamedTuple):
    """What a step of work sends: bytes, seconds of copying, moments at which some is saved."""

    bytes: int = 0
    seconds: float = 0.0
    moments: int = 1


class _Bundle(NamedTuple):
    """Work from `begun` to `ended` that saves something at so many moments on its way."""

    begun: float
    ended: float
    moments: int

    def copied(self, lane: float, copy_s: float) -> float:
        """When the last of it is copied by a lane that is free from `lane` on."""
        part = 1 / self.moments
        first = self.begun + part * (self.ended - self.begun)
        return max(max(lane, first) + copy_s, self.ended + part * copy_s)


def _points(
    loads: Sequence[_Load], seconds: Sequence[float], room: Sequence[float], unsure: float
) -> list[int]:
    """The boundary at which each step's bundle is let go; boundary b lies before step b.

    `room` is what may be in transit during each step.
    A bundle is let go when its copy is done, also if all work up to then took the share `unsure`
    less than it should; sooner where the next step has no room for it, and in any case at the end.
    """
    points = list(range(1, len(loads) + 1))
    waiting: deque[tuple[int, int, float]] = deque()
    now = lane = 0.0
    sure = 1 - unsure
    in_transit = 0
    for step, load in enumerate(loads):
        begun, now = now, now + seconds[step]
        if load.bytes:
            lane = _Bundle(begun, now, load.moments).copied(lane, load.seconds)
            waiting.append((step, load.bytes, lane))
            in_transit += load.bytes
        boundary = step + 1
        last = boundary == len(loads)
        while waiting and (last or waiting[0][2] <= sure * now or in_transit > room[boundary]):
            first, bytes_out, done = waiting.popleft()
            points[first] = boundary
            in_transit -= bytes_out
            now = max(now, done)
    return points
