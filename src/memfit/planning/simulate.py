"""The only place that predicts: bytes and seconds of a step under given decisions.

A decision is a set of acts: runs of segment calls recomputed whole, and picks of other variants
for single calls. Calls in no act are kept. Under a decision each block lives from its birth until
the running code drops it, the calls that keep it let go of it, or the acts that need it are done;
and every act adds what it holds, makes anew or needs for a moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np

from memfit.ir.joint_graph import JointGraph, Variant
from memfit.ir.profile import Measurements, Profile
from memfit.ir.step_graph import BLOCK_CATEGORIES, Call, StepGraph
from memfit.ir.timeline import Point, Timeline
from memfit.planning.acts import Act, Effect, Ints, Pick, Run, covered
from memfit.planning.segment.menu import menu_of, variant_of

_ACTIVATIONS = BLOCK_CATEGORIES.index("activations")


def simulator_of(profile: Profile, min_tensor_bytes: int = 0) -> Simulator:
    """The simulator of a profile; the last one made is kept, with what was solved for it."""
    global _latest
    latest = _latest
    if (
        latest is None
        or latest.profile is not profile
        or latest.min_tensor_bytes != min_tensor_bytes
    ):
        _latest = latest = Simulator(profile, min_tensor_bytes)
    return latest


@lru_cache(maxsize=64)
def _menu(
    graph: JointGraph, known: Measurements, min_tensor_bytes: int
) -> tuple[tuple[Variant, float], ...]:
    """The variants of a graph with their seconds; first the one that runs when nobody decides."""
    first = tuple(sorted(graph.unplanned))
    measured = {v.saved: v for v in known.variants}
    unplanned = measured.get(first) or variant_of(graph, first)
    base_s = sum(graph.again_seconds[n] for n in unplanned.recomputed)
    # A measured variant says what it adds; to compete with reckoned ones it is put on their scale.
    rivals = [replace(v, seconds=v.seconds / known.factor + base_s) for v in known.variants]
    offered = menu_of(
        graph,
        min_tensor_bytes=min_tensor_bytes,
        extra=(*rivals, replace(unplanned, seconds=base_s)),
    )
    rows = [(unplanned, 0.0)]
    for variant in offered:
        if variant.saved in measured:
            rows.append((measured[variant.saved], measured[variant.saved].seconds))
        elif variant.saved != first:
            rows.append((variant, max((variant.seconds - base_s) * known.factor, 0.0)))
    return tuple(rows)


class Simulator:
    """Predicts timelines, peaks and seconds of one profiled step."""

    def __init__(self, profile: Profile, min_tensor_bytes: int = 0) -> None:
        self.profile = profile
        self.min_tensor_bytes = min_tensor_bytes
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
        self.effect = lru_cache(maxsize=None)(self._effect)

    # -- what can be chosen -------------------------------------------------------------------

    @cached_property
    def menus(self) -> list[tuple[tuple[Variant, float], ...]]:
        """Per joint graph its variants with the seconds each adds; the first adds none."""
        known = self.profile.known or (Measurements(),) * len(self.profile.graphs)
        return [
            _menu(graph, seen, self.min_tensor_bytes)
            for graph, seen in zip(self.profile.graphs, known, strict=True)
        ]

    def picks(self) -> list[Pick]:
        """Every pick there is: the variants of each captured call but its first."""
        return [
            Pick(call.index, variant)
            for call in self.graph.calls
            if call.graph >= 0 and call.need >= 0
            for variant in range(1, len(self.menus[call.graph]))
        ]

    def variant(self, pick: Pick) -> Variant:
        """The variant that a pick names."""
        return self.menus[self.graph.calls[pick.call].graph][pick.variant][0]

    # -- seconds ------------------------------------------------------------------------------

    def seconds_of(self, act: Act) -> float:
        """Seconds that an act adds to the device's work."""
        if isinstance(act, Pick):
            graph = self.graph.calls[act.call].graph
            return self.profile.accumulate * self.menus[graph][act.variant][1]
        times = self.profile.call_times[act[0] : act[1] + 1]
        return self.profile.accumulate * sum(t.recompute_s for t in times)

    def host_seconds_of(self, act: Act) -> float:
        """Seconds that an act adds to the host's work; a pick's operators run in code that is
        launched as one."""
        if isinstance(act, Pick):
            return 0.0
        times = self.profile.call_times[act[0] : act[1] + 1]
        return self.profile.accumulate * sum(t.recompute_host_s for t in times)

    def extra_seconds(self, acts: Sequence[Act]) -> float:
        """Seconds that the acts add to the step: the device's, or the host's if it cannot keep
        up."""
        device_s = sum(self.seconds_of(act) for act in acts)
        host_s = sum(self.host_seconds_of(act) for act in acts)
        return max(device_s, host_s - self.profile.host_slack_s)

    def step_seconds(self, acts: Sequence[Act]) -> float:
        """Seconds of the whole step."""
        return self.profile.step_s + self.extra_seconds(acts)

    # -- bytes --------------------------------------------------------------------------------

    def peak_bytes(self, acts: Sequence[Act]) -> int:
        """The highest bytes of the step."""
        curve = self._curves(acts).sum(axis=0)
        highest = int(curve.max())
        for act in acts:
            for position, extra, _ in self.effect(act).inside:
                highest = max(highest, int(curve[position]) + extra)
        return highest + self.graph.static_bytes

    def over(self, acts: Sequence[Act], budget: int) -> list[int]:
        """Positions over the budget: the worst of each stretch over it, moments inside left out."""
        curve = self._curves(acts).sum(axis=0) + self.graph.static_bytes
        above = np.flatnonzero(curve > budget)
        if not len(above):
            return []
        stretches = np.split(above, np.flatnonzero(np.diff(above) > 1) + 1)
        return [int(s[np.argmax(curve[s])]) for s in stretches]

    def timeline(self, acts: Sequence[Act]) -> Timeline:
        """The step's bytes by category at every position, moments inside acts included."""
        curves = self._curves(acts)
        static = {name: n for name, n in self.graph.static.items() if n}
        inside: dict[int, list[tuple[int, str]]] = {}
        for act in acts:
            for position, extra, what in self.effect(act).inside:
                inside.setdefault(position, []).append((extra, what))
        points = []
        places = self._places()
        for position in range(self.graph.length):
            column = curves[:, position]
            for extra, what in inside.get(position, ()):
                sizes = self._sizes(column, static)
                sizes["temporaries"] += extra
                points.append(Point(position, what, sizes))
            points.append(Point(position, places[position], self._sizes(column, static)))
        return Timeline(tuple(points), max(points, key=lambda p: p.total))

    def live_blocks(self, acts: Sequence[Act], position: int) -> list[int]:
        """Blocks alive at a position, originals and those made anew, largest first."""
        death = self.deaths(acts)
        alive = set(np.flatnonzero((self.birth <= position) & (position < death)).tolist())
        for act in acts:
            effect = self.effect(act)
            if effect.need <= position:
                alive.update(effect.blocks[effect.releases > position].tolist())
        return sorted(alive, key=lambda b: (-int(self.bytes[b]), b))

    # -- how ----------------------------------------------------------------------------------

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

    def _curves(self, acts: Sequence[Act]) -> Ints:
        change = np.zeros((len(BLOCK_CATEGORIES), self.graph.length + 1), dtype=np.int64)
        death = np.minimum(self.deaths(acts), self.graph.length)
        np.add.at(change, (self._category, self.birth), self.bytes)
        np.add.at(change, (self._category, death), -self.bytes)
        for act in acts:
            effect = self.effect(act)
            for start, until, size in effect.standing:
                change[_ACTIVATIONS, start] += size
                change[_ACTIVATIONS, until] -= size
            if len(effect.blocks):
                change[_ACTIVATIONS, effect.need] += effect.survivor_bytes
                np.add.at(change[_ACTIVATIONS], effect.releases, -self.bytes[effect.blocks])
        return np.cumsum(change, axis=1)[:, :-1]

    def deaths(self, acts: Sequence[Act]) -> Ints:
        """Where each original block dies under `acts`; one that is never made, at its birth."""
        decided = np.zeros(len(self.graph.calls), dtype=bool)
        decided[sorted(covered(list(acts)))] = True
        death = self.death.copy()
        kept = ~decided[self.hold_call]
        np.maximum.at(death, self.hold_block[kept], self.hold_release[kept])
        for act in acts:
            effect = self.effect(act)
            death[effect.held] = np.maximum(death[effect.held], effect.held_until)
        for act in acts:
            absent = self.effect(act).absent
            death[absent] = self.birth[absent]
        return death

    def _effect(self, act: Act) -> Effect:
        if isinstance(act, Pick):
            return self._pick(self.graph.calls[act.call], self.variant(act))
        return self._replay(act)

    def own_blocks(self, call: Call) -> Ints:
        """Blocks that a captured call's graphs make and free within its forward or backward."""
        within = (self.call == call.index) & (self.death <= call.exit)
        backward = (self.birth > call.need) & (self.birth < call.finish)
        return np.flatnonzero(within | (backward & (self.death <= call.finish)))

    def _pick(self, call: Call, variant: Variant) -> Effect:
        """What a variant holds, and the moments inside its two graphs.

        Everything outside stands still while a graph runs, so its own peak adds to that.
        """
        graph = self.profile.graphs[call.graph]
        names = [graph.nodes[n].name for n in graph.held_outside(variant.saved)]
        held = sorted({call.held[name] for name in names if call.held.get(name, -1) >= 0})
        none = np.array([], dtype=np.int64)
        return Effect(
            need=call.need,
            held=np.array(held, dtype=np.int64),
            held_until=call.need + 1,
            blocks=none,
            releases=none,
            survivor_bytes=0,
            standing=((call.exit, call.need + 1, variant.held_bytes),),
            inside=(
                (call.enter, variant.forward_peak_bytes, f"forward {call.name}"),
                (call.need, variant.backward_peak_bytes, f"backward {call.name}"),
            ),
            absent=self.own_blocks(call),
        )

    def _replay(self, run: Run) -> Effect:
        """What recomputing a run does; nothing when its backward needs nothing from it."""
        first, last = run
        calls = self.graph.calls[first : last + 1]
        none = np.array([], dtype=np.int64)
        needs = [c.need for c in calls if c.need >= 0]
        if not needs:
            return Effect(0, none, 0, none, none, 0, (), (), none)
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
        need, done = min(needs), max(c.done for c in calls)
        state_bytes = sum(c.state_bytes for c in calls)
        name = calls[0].name if first == last else f"{calls[0].name}..{calls[-1].name}"
        return Effect(
            need=need,
            held=arguments,
            held_until=done,
            blocks=survivors,
            releases=release[survivors],
            survivor_bytes=survivor_bytes,
            standing=((start, done, state_bytes),),
            inside=((need, int(np.cumsum(change).max()) - survivor_bytes, f"recompute {name}"),),
            absent=none,
        )


_latest: Simulator | None = None
