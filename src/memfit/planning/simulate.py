"""The only place that predicts: bytes and seconds of a step under given decisions.

A decision is a set of runs: consecutive segment calls that are recomputed as one. Calls in no run
are kept. Under a decision each block lives from its birth until the running code drops it, the
calls that keep it let go of it, or the runs that need it as an argument are done; and every run
makes its blocks once more when its backward begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from memfit.ir.profile import Profile
from memfit.ir.step_graph import BLOCK_CATEGORIES, StepGraph
from memfit.ir.timeline import Point, Timeline

Run = tuple[int, int]
Ints = np.ndarray

_ACTIVATIONS = BLOCK_CATEGORIES.index("activations")


@dataclass(frozen=True)
class Replay:
    """What recomputing a run does at position `need`.

    `blocks` of the run are made anew and survive until `releases`; `peak_bytes` is the most that
    is live inside the replay, survivors included.
    """

    need: int
    done: int
    held_arguments: Ints
    blocks: Ints
    releases: Ints
    survivor_bytes: int
    peak_bytes: int
    state_bytes: int


def simulator_of(profile: Profile) -> Simulator:
    """The simulator of a profile; the last one made is kept, with what was solved for it."""
    global _latest
    if _latest is None or _latest.profile is not profile:
        _latest = Simulator(profile)
    return _latest


class Simulator:
    """Predicts timelines, peaks and seconds of one profiled step."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        graph = profile.graph
        self.graph: StepGraph = graph.accumulating() if profile.accumulate > 1 else graph
        blocks = self.graph.blocks
        self.bytes = np.array([b.bytes for b in blocks], dtype=np.int64)
        self.birth = np.array([b.birth for b in blocks], dtype=np.int64)
        self.death = np.array([b.death for b in blocks], dtype=np.int64)
        self.call = np.array([b.call for b in blocks], dtype=np.int64)
        self._category = np.array(
            [BLOCK_CATEGORIES.index(b.category) for b in blocks], dtype=np.int64
        )
        holds = [(b.id, h.call, h.release, h.replay_release) for b in blocks for h in b.holds]
        table = np.array(holds, dtype=np.int64).reshape(-1, 4)
        self.hold_block, self.hold_call, self.hold_release, self._replay_release = table.T
        self.replay = lru_cache(maxsize=None)(self._replay)

    # -- seconds ------------------------------------------------------------------------------

    def run_seconds(self, run: Run) -> float:
        """Seconds that recomputing the run takes on the device."""
        times = self.profile.call_times[run[0] : run[1] + 1]
        return self.profile.accumulate * sum(t.recompute_s for t in times)

    def run_host_seconds(self, run: Run) -> float:
        """Seconds that recomputing the run takes on the host."""
        times = self.profile.call_times[run[0] : run[1] + 1]
        return self.profile.accumulate * sum(t.recompute_host_s for t in times)

    def extra_seconds(self, runs: Sequence[Run]) -> float:
        """Seconds that recomputing the runs adds to the step: the device's, or the host's if it
        cannot keep up."""
        device_s = sum(self.run_seconds(run) for run in runs)
        host_s = sum(self.run_host_seconds(run) for run in runs)
        return max(device_s, host_s - self.profile.host_slack_s)

    def step_seconds(self, runs: Sequence[Run]) -> float:
        """Seconds of the whole step."""
        return self.profile.step_s + self.extra_seconds(runs)

    # -- bytes --------------------------------------------------------------------------------

    def peak_bytes(self, runs: Sequence[Run]) -> int:
        """The highest bytes of the step."""
        curve = self._curves(runs).sum(axis=0)
        highest = int(curve.max())
        for run in runs:
            replay = self.replay(run)
            if replay is not None:
                inside = int(curve[replay.need]) - replay.survivor_bytes + replay.peak_bytes
                highest = max(highest, inside)
        return highest + self.graph.static_bytes

    def over(self, runs: Sequence[Run], budget: int) -> list[int]:
        """Positions over the budget: the worst of each stretch over it, replays left out."""
        curve = self._curves(runs).sum(axis=0) + self.graph.static_bytes
        above = np.flatnonzero(curve > budget)
        if not len(above):
            return []
        stretches = np.split(above, np.flatnonzero(np.diff(above) > 1) + 1)
        return [int(s[np.argmax(curve[s])]) for s in stretches]

    def timeline(self, runs: Sequence[Run]) -> Timeline:
        """The step's bytes by category at every position, replays included."""
        curves = self._curves(runs)
        static = {name: n for name, n in self.graph.static.items() if n}
        points = []
        replays = {r.need: (run, r) for run in runs if (r := self.replay(run)) is not None}
        places = self._places()
        for position in range(self.graph.length):
            column = curves[:, position]
            if position in replays:
                run, replay = replays[position]
                points.append(self._replay_point(run, replay, column, static))
            points.append(Point(position, places[position], self._sizes(column, static)))
        return Timeline(tuple(points), max(points, key=lambda p: p.total))

    def live_blocks(self, runs: Sequence[Run], position: int) -> list[int]:
        """Blocks alive at a position, originals and replayed ones, largest first."""
        death = self.deaths(runs)
        alive = set(np.flatnonzero((self.birth <= position) & (position < death)).tolist())
        for run in runs:
            replay = self.replay(run)
            if replay is not None and replay.need <= position:
                alive.update(replay.blocks[replay.releases > position].tolist())
        return sorted(alive, key=lambda b: (-int(self.bytes[b]), b))

    # -- how ----------------------------------------------------------------------------------

    def _replay_point(
        self, run: Run, replay: Replay, column: Ints, static: dict[str, int]
    ) -> Point:
        sizes = self._sizes(column, static)
        sizes["temporaries"] += replay.peak_bytes - replay.survivor_bytes
        first, last = (self.graph.calls[c].name for c in run)
        name = first if first == last else f"{first}..{last}"
        return Point(replay.need, f"recompute {name}", sizes)

    def _sizes(self, column: Ints, static: dict[str, int]) -> dict[str, int]:
        sizes = dict(static)
        for i, name in enumerate(BLOCK_CATEGORIES):
            sizes[name] = sizes.get(name, 0) + int(column[i])
        return sizes

    def _places(self) -> list[str]:
        graph = self.graph
        places = ["forward"] * graph.length
        for position in range(graph.forward_end, graph.length):
            places[position] = "backward" if position < graph.backward_end else "optimizer"
        for call in graph.calls:
            places[call.enter : call.exit] = [f"forward {call.name}"] * (call.exit - call.enter)
            if call.need >= 0:
                width = max(call.done, call.need) - call.need
                places[call.need : call.need + width] = [f"backward {call.name}"] * width
        return places

    def _curves(self, runs: Sequence[Run]) -> Ints:
        change = np.zeros((len(BLOCK_CATEGORIES), self.graph.length + 1), dtype=np.int64)
        death = np.minimum(self.deaths(runs), self.graph.length)
        np.add.at(change, (self._category, self.birth), self.bytes)
        np.add.at(change, (self._category, death), -self.bytes)
        for run in runs:
            replay = self.replay(run)
            if replay is not None:
                change[_ACTIVATIONS, self.graph.calls[run[0]].enter] += replay.state_bytes
                change[_ACTIVATIONS, replay.done] -= replay.state_bytes
                change[_ACTIVATIONS, replay.need] += replay.survivor_bytes
                np.add.at(change[_ACTIVATIONS], replay.releases, -self.bytes[replay.blocks])
        return np.cumsum(change, axis=1)[:, :-1]

    def deaths(self, runs: Sequence[Run]) -> Ints:
        """Where each original block dies under `runs`."""
        recomputed = np.zeros(len(self.graph.calls), dtype=bool)
        for first, last in runs:
            recomputed[first : last + 1] = True
        death = self.death.copy()
        kept = ~recomputed[self.hold_call]
        np.maximum.at(death, self.hold_block[kept], self.hold_release[kept])
        for run in runs:
            replay = self.replay(run)
            if replay is not None:
                held = replay.held_arguments
                death[held] = np.maximum(death[held], replay.done)
        return death

    def _replay(self, run: Run) -> Replay | None:
        """The replay of a run; None when its backward needs nothing from it."""
        first, last = run
        calls = self.graph.calls[first : last + 1]
        needs = [c.need for c in calls if c.need >= 0]
        if not needs:
            return None
        arguments = np.array(sorted(self.graph.held_arguments(first, last)), dtype=np.int64)
        stop = max(c.stop for c in calls)
        mine = (self.call >= first) & (self.call <= last) & (self.birth <= stop)
        holds = (self.hold_call >= first) & (self.hold_call <= last)
        # Saved inside the run: made by it, or gone by then and neither made nor passed in (a cast
        # that autocast cached for an earlier segment), which the replay has to make again.
        blocks = self.hold_block[holds]
        inside = mine[blocks] | ~(np.isin(blocks, arguments) | (self.death[blocks] > min(needs)))
        release = np.full(len(self.bytes), -1, dtype=np.int64)
        np.maximum.at(release, blocks[inside], self._replay_release[holds][inside])
        survivors = np.flatnonzero(release > min(needs))
        survivor_bytes = int(self.bytes[survivors].sum())
        made_again = survivors[~mine[survivors]]

        start = calls[0].enter
        change = np.zeros(stop - start + 2, dtype=np.int64)
        change[0] += self.bytes[made_again].sum()
        own = np.flatnonzero(mine)
        np.add.at(change, self.birth[own] - start, self.bytes[own])
        passing = own[(release[own] < 0) & (self.death[own] <= stop)]
        np.add.at(change, self.death[passing] - start, -self.bytes[passing])
        return Replay(
            need=min(needs),
            done=max(c.done for c in calls),
            held_arguments=arguments,
            blocks=survivors,
            releases=release[survivors],
            survivor_bytes=survivor_bytes,
            peak_bytes=int(np.cumsum(change).max()),
            state_bytes=sum(c.state_bytes for c in calls),
        )


_latest: Simulator | None = None
