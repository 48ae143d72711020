"""Bytes and seconds of a step under given decisions: what every prediction is made by.

`reserved` has what the CUDA allocator adds to the bytes, `segment.passes` what one variant of a
segment costs; everything else asks these three.

A decision is a set of acts: runs of segment calls recomputed whole, picks of other variants for
single calls, and what waits on the host in between. Calls in no act are kept. Under a decision each
block lives from its birth until the running code drops it, the calls that keep it let go of it, or
the acts that need it are done; and every act adds what it holds, makes anew, copies back or needs
for a moment. Copies share one lane for each direction: see `copies`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache, partial

import numpy as np

from memfit.ir.joint_graph import Variant
from memfit.ir.profile import Measurements, Profile
from memfit.ir.step_graph import BLOCK_CATEGORIES, StepGraph
from memfit.ir.timeline import Point, Timeline
from memfit.planning.acts import Act, Away, Ints, Pick, Send, calls_of, covered
from memfit.planning.copies import Copies, CopyTimes
from memfit.planning.effects import effect_of
from memfit.planning.segment.menu import Limits, limits_for
from memfit.planning.segment.offload import round_trip_s, smallest_move_bytes
from memfit.planning.segment.passes import backward_peak_bytes, movable
from memfit.planning.segment.priced_menu import Menu, priced_menu, priced_variant
from memfit.planning.techniques import ACTIVATIONS

_ACTIVATIONS = BLOCK_CATEGORIES.index("activations")


def simulator_of(
    profile: Profile, min_tensor_bytes: int = 0, techniques: Sequence[str] = ("recompute",)
) -> Simulator:
    """The simulator of a profile; the last one made is kept, with what was solved for it."""
    global _latest
    latest = _latest
    wanted = (min_tensor_bytes, tuple(techniques))
    if (
        latest is None
        or latest.profile is not profile
        or (latest.min_tensor_bytes, latest.techniques) != wanted
    ):
        _latest = latest = Simulator(profile, *wanted)
    return latest


class Simulator:
    """Predicts timelines, peaks and seconds of one profiled step."""

    def __init__(
        self,
        profile: Profile,
        min_tensor_bytes: int = 0,
        techniques: tuple[str, ...] = ("recompute", "offload"),
    ) -> None:
        """`techniques` are what acts may do; without copy rates nothing can be moved."""
        self.profile = profile
        self.min_tensor_bytes = min_tensor_bytes
        self.techniques = techniques
        self.recompute = "recompute" in techniques
        self.copy = profile.copy if "offload" in techniques else None
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
        self.hold_block, self.hold_call, self.hold_release, self.replay_release = table.T
        self.effect = lru_cache(maxsize=None)(partial(effect_of, self))
        self.backward_peak_bytes = lru_cache(maxsize=None)(self._backward_peak_bytes)
        self.copies = Copies(self.graph, profile, self.copy)
        self._only: dict[str, Simulator] = {}

    def only(self, technique: str) -> Simulator:
        """The same step, where of recompute and offload this one alone may be used."""
        if technique not in self._only:
            others = [t for t in self.techniques if t not in ACTIVATIONS]
            self._only[technique] = Simulator(
                self.profile, self.min_tensor_bytes, (technique, *others)
            )
        return self._only[technique]

    # -- what can be chosen -------------------------------------------------------------------

    @cached_property
    def menus(self) -> list[Menu]:
        """Per joint graph its variants with the seconds each adds; the first adds none."""
        return [
            priced_menu(graph, known, self.min_tensor_bytes, self.copy, staying, limits)
            for graph, known, staying, limits in zip(
                self.profile.graphs, self._known, self._staying, self._limits(), strict=True
            )
        ]

    def _limits(self) -> list[Limits]:
        """Per joint graph the limits of its menu, by what it has of all there is to win."""
        graphs, counts = self.profile.graphs, Counter(call.graph for call in self.graph.calls)
        sizes = [sum(n.bytes for n in graph.nodes) * sum(graph.again_seconds) for graph in graphs]
        total = sum(counts[number] * size for number, size in enumerate(sizes)) or 1
        return [
            limits_for(size / total, counts[number] * size / total)
            for number, size in enumerate(sizes)
        ]

    @cached_property
    def _staying(self) -> list[frozenset[int]]:
        """Per joint graph the inputs that the step does not make (a batch) in some call."""
        found: list[set[int]] = [set() for _ in self.profile.graphs]
        for call in self.graph.calls:
            for name, block in call.held.items() if call.graph >= 0 else ():
                node = self.profile.graphs[call.graph].index.get(name)
                if block < 0 and node is not None:
                    found[call.graph].add(node)
        return [frozenset(nodes) for nodes in found]

    @property
    def _known(self) -> Sequence[Measurements]:
        return self.profile.known or (Measurements(),) * len(self.profile.graphs)

    def offer(self, graph: int, saved: Iterable[int], moved: Iterable[int] = ()) -> int:
        """The number of a variant in a graph's menu, where it is put if it is not there."""
        wanted = (tuple(sorted(saved)), tuple(sorted(moved)))
        for number, (variant, _) in enumerate(self.menus[graph]):
            if (variant.saved, variant.moved) == wanted:
                return number
        joint = self.profile.graphs[graph]
        row = priced_variant(joint, self._known[graph], *wanted, self.copy)
        self.menus[graph] = (*self.menus[graph], row)
        return len(self.menus[graph]) - 1

    def picks(self) -> list[Pick]:
        """Every pick there is: the variants of each captured call but its first."""
        return [
            Pick(call.index, variant)
            for call in self.graph.calls
            if call.graph >= 0 and call.need >= 0
            for variant in range(1, len(self.menus[call.graph]))
            if self.may(Pick(call.index, variant))
        ]

    def may(self, pick: Pick) -> bool:
        """Whether the techniques allow a pick: menus have variants that recompute in any case."""
        return self.recompute or not self.recomputes(pick)

    def recomputes(self, act: Pick | Send) -> bool:
        """Whether an act about one call makes anything again."""
        if isinstance(act, Send):
            return False
        graph = self.profile.graphs[self.graph.calls[act.call].graph]
        return set(self.variant(act).saved) != set(graph.unplanned)

    def everything_moved(self, graph: int) -> int | None:
        """The variant that keeps what is kept unplanned and moves all that is worth it."""
        joint, unplanned = self.profile.graphs[graph], self.menus[graph][0][0]
        if self.copy is None:
            return None
        groups = movable(joint, unplanned, self.smallest_move_bytes, self._staying[graph])
        moved = [node for group in groups for node in group]
        return self.offer(graph, unplanned.saved, moved) if moved else None

    def sends(self) -> list[Send]:
        """Every send there is: calls without a joint graph that keep something large."""
        if self.copy is None:
            return []
        found = [Send(c.index) for c in self.graph.calls if c.graph < 0 and c.need >= 0]
        return [send for send in found if self.effect(send).away is not None]

    @property
    def smallest_move_bytes(self) -> int:
        """Smaller tensors stay: to start a copy takes longer than copying them."""
        return 0 if self.copy is None else smallest_move_bytes(self.copy, self.min_tensor_bytes)

    def variant(self, pick: Pick) -> Variant:
        """The variant that a pick names."""
        return self.menus[self.graph.calls[pick.call].graph][pick.variant][0]

    def _backward_peak_bytes(
        self, graph: int, variant: int, tangents_stay: bool, freed: frozenset[int]
    ) -> int:
        """The peak inside a backward by a variant of a graph's menu: see `passes`."""
        return backward_peak_bytes(
            self.profile.graphs[graph],
            self.menus[graph][variant][0],
            tangents_stay=tangents_stay,
            freed=freed,
        )

    # -- seconds ------------------------------------------------------------------------------

    def seconds_of(self, act: Act) -> float:
        """Seconds that an act adds to the device's work."""
        if isinstance(act, Pick):
            graph = self.graph.calls[act.call].graph
            return self.profile.passes * self.menus[graph][act.variant][1]
        if isinstance(act, Send):
            return self.drag_seconds(act)
        times = self.profile.call_times[act[0] : act[1] + 1]
        return self.profile.passes * sum(t.recompute_s for t in times)

    def drag_seconds(self, act: Act) -> float:
        """Of the seconds an act adds, those by which its copies slow down what runs beside them."""
        away = None if isinstance(act, tuple) else self.effect(act).away
        if away is None:
            return 0.0
        assert self.copy is not None
        size = away.own_bytes + int(self.bytes[away.blocks].sum())
        once_s = self.copy.drag * round_trip_s(self.copy, size, away.tensors)
        return self.profile.passes * once_s

    @property
    def most_drag_s(self) -> float:
        """However long it is copied: what is slowed down is the step's own work."""
        if self.copy is None or not self.copies.overlap:
            return float("inf")
        return self.copy.drag * self.profile.step_s

    def recompute_seconds(self, pick: Pick) -> float:
        """Of the seconds a pick adds, those of recomputing."""
        graph = self.graph.calls[pick.call].graph
        number = self.offer(graph, self.variant(pick).saved)  # may put it into the menu
        return self.menus[graph][number][1]

    def host_seconds_of(self, act: Act) -> float:
        """Seconds that an act adds to the host's work: a pick's operators run in code that is
        launched as one, but each of its copies is launched by itself."""
        if not isinstance(act, tuple):
            away, copy = self.effect(act).away, self.copy
            if away is None or copy is None:
                return 0.0
            each_s = max(copy.host_s, 2 * copy.latency_s)
            return self.profile.passes * away.tensors * each_s
        times = self.profile.call_times[act[0] : act[1] + 1]
        return self.profile.passes * sum(t.recompute_host_s for t in times)

    def extra_seconds(self, acts: Sequence[Act]) -> float:
        """Seconds that the acts add to the step: the device's, or the host's if it cannot keep
        up. While the device waits for copies, the host works on."""
        device_s = sum(self.seconds_of(act) for act in acts)
        device_s -= max(sum(self.drag_seconds(act) for act in acts) - self.most_drag_s, 0.0)
        host_s = sum(self.host_seconds_of(act) for act in acts)
        waits_s = self.profile.passes * self.traffic(acts).stall_s
        return max(device_s + waits_s, host_s - self.profile.host_slack_s)

    def traffic(self, acts: Sequence[Act]) -> CopyTimes:
        """The copies of the step on their lanes, and what waits for them."""
        return self.copies.traffic(self.loads(acts), self.added_seconds(acts))

    def scheduled(
        self, acts: Sequence[Act], budget: int | None, unsure: float = 0.0
    ) -> tuple[Act, ...]:
        """The acts with points for their copies: as late as the budget lets memory go, as early
        as it has room again, so that little waits for a copy."""
        return self.copies.scheduled(self, acts, budget, unsure)

    def loads(self, acts: Sequence[Act]) -> list[tuple[Away, int, int]]:
        """What is away, with the bytes each call sends and gets back; each block is copied once."""
        aways = [a for act in acts if (a := self.effect(act).away) is not None]
        aways.sort(key=lambda away: away.call)
        out = [away.own_bytes for away in aways]
        back = list(out)
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for number, away in enumerate(aways):
            for block in away.blocks.tolist():
                first.setdefault(block, number)
                last[block] = number
        for block, number in first.items():
            out[number] += int(self.bytes[block])
            back[last[block]] += int(self.bytes[block])
        return list(zip(aways, out, back, strict=True))

    def added_seconds(self, acts: Sequence[Act]) -> dict[int, float]:
        """Seconds that acts add to the backward, by the call whose backward they delay."""
        found: dict[int, float] = {}
        for act in acts:
            call = calls_of(act)[-1]
            found[call] = found.get(call, 0.0) + self.seconds_of(act) / self.profile.passes
        return found

    def host_bytes(self, acts: Sequence[Act]) -> int:
        """The host memory that is taken at once, at most: there every tensor is rounded up."""
        return sum(out + away.rounding_bytes for away, out, _ in self.loads(acts))

    def fits_host(self, acts: Sequence[Act], host_bytes: int | None) -> bool:
        """Whether so much host memory, if it has a limit, is enough."""
        return host_bytes is None or self.host_bytes(acts) <= host_bytes

    def step_seconds(self, acts: Sequence[Act]) -> float:
        """Seconds of the whole step."""
        return self.profile.step_s + self.extra_seconds(acts)

    # -- bytes --------------------------------------------------------------------------------

    def peak_bytes(self, acts: Sequence[Act]) -> int:
        """The highest bytes of the step."""
        return int(self.highest(acts).max())

    def highest(self, acts: Sequence[Act]) -> Ints:
        """The bytes at every position, moments inside acts included."""
        curve = self._curve(acts)
        highest = curve.copy()
        for act in acts:
            for position, extra, _ in self.effect(act).inside:
                highest[position] = max(highest[position], curve[position] + extra)
        return highest

    def over(self, acts: Sequence[Act], budget: int) -> list[int]:
        """Positions over the budget: the worst of each stretch over it, moments inside left out."""
        curve = self._curve(acts)
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
        """The bytes of each category at every position, without static ones."""
        change = np.zeros((len(BLOCK_CATEGORIES), self.graph.length + 1), dtype=np.int64)
        death = np.minimum(self.deaths(acts), self.graph.length)
        np.add.at(change, (self._category, self.birth), self.bytes)
        np.add.at(change, (self._category, death), -self.bytes)
        self._add_acts(change[_ACTIVATIONS], acts)
        return np.cumsum(change, axis=1)[:, :-1]

    def _curve(self, acts: Sequence[Act]) -> Ints:
        """All bytes at every position, static ones included; peaks are asked for all the time."""
        change = self._births.copy()
        np.add.at(change, np.minimum(self.deaths(acts), self.graph.length), -self.bytes)
        self._add_acts(change, acts)
        return np.cumsum(change)[:-1]

    @cached_property
    def _births(self) -> Ints:
        """What comes at every position where nothing is decided, static bytes first."""
        change = np.zeros(self.graph.length + 1, dtype=np.int64)
        np.add.at(change, self.birth, self.bytes)
        change[0] += self.graph.static_bytes
        return change

    def _add_acts(self, change: Ints, acts: Sequence[Act]) -> None:
        """Add what acts hold beside the step's own blocks, make anew and copy back."""
        for act in acts:
            effect = self.effect(act)
            for start, until, size in effect.standing:
                change[start] += size
                change[until] -= size
            if len(effect.blocks):
                change[effect.need] += effect.survivor_bytes
                np.add.at(change, effect.releases, -self.bytes[effect.blocks])
        for block, (returns, release) in self.copied_back(acts).items():
            change[returns] += self.bytes[block]
            change[release] -= self.bytes[block]

    def deaths(self, acts: Sequence[Act]) -> Ints:
        """Where each original block dies under `acts`; one that is never made, at its birth."""
        decided = np.zeros(len(self.graph.calls), dtype=bool)
        decided[sorted(covered(list(acts)))] = True
        death = self.death.copy()
        kept = ~decided[self.hold_call]
        np.maximum.at(death, self.hold_block[kept], self.hold_release[kept])
        leaves: dict[int, int] = {}
        for act in acts:
            effect = self.effect(act)
            death[effect.held] = np.maximum(death[effect.held], effect.held_until)
            if (away := effect.away) is not None:
                for block in away.blocks.tolist():
                    leaves[block] = min(leaves.get(block, away.leaves), away.leaves)
        for block, position in leaves.items():
            death[block] = max(death[block], position)
        for act in acts:
            absent = self.effect(act).absent
            death[absent] = self.birth[absent]
        return death

    def copied_back(self, acts: Sequence[Act]) -> dict[int, tuple[int, int]]:
        """Where each moved block is on the device again, and where it is let go."""
        found: dict[int, tuple[int, int]] = {}
        for act in acts:
            away = self.effect(act).away
            if away is None:
                continue
            for block, release in zip(away.blocks.tolist(), away.releases.tolist(), strict=True):
                known = found.get(block, (away.returns, release))
                found[block] = (min(known[0], away.returns), max(known[1], release))
        return found


_latest: Simulator | None = None
