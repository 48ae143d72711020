"""The candidates of a whole step: what its captured calls keep when nobody decides.

Memory counts once: tensors that share a storage, or a block of the step in several calls, are one
candidate. One that enters a call which keeps it cannot be recomputed there, only swapped. A
captured call gets back all that it moved before its backward begins: that is when a copy is due.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from memfit.ir.joint_graph import JointGraph
from memfit.ir.step_graph import Call
from memfit.planning.mutwo.step import NEVER_S, Candidate, Step
from memfit.planning.segment.decisions import readers_of
from memfit.planning.segment.mincut import Choices
from memfit.planning.segment.offload import round_trip_s
from memfit.planning.simulate import Simulator

Place = tuple[int, int]  # a call and a node of its graph


@dataclass(frozen=True)
class Gathered:
    """The step as the algorithm sees it, and what its candidates and ranks stand for."""

    step: Step
    places: tuple[tuple[Place, ...], ...]  # the tensors of each candidate
    order: tuple[int, ...]  # calls by their backwards
    starts: tuple[int, ...]  # the rank each of those begins with; one more: where they end


class Segment:
    """One joint graph: its operators, and the ways to make a saved node again."""

    def __init__(self, graph: JointGraph, factor: float, min_tensor_bytes: int) -> None:
        self.graph = graph
        self.choices = Choices(graph, min_tensor_bytes=min_tensor_bytes)
        self.kept = frozenset(graph.unplanned)
        self._again_s = [factor * seconds for seconds in graph.again_seconds]
        forward = graph.forward_order()
        backward = [n for n, node in enumerate(graph.nodes) if node.role == "backward"]
        self.forward_s = [graph.nodes[n].seconds for n in forward] or [0.0]
        self.backward_s = [graph.nodes[n].seconds for n in backward] or [0.0]
        self._forward_rank = {n: rank for rank, n in enumerate(forward)}
        self._backward_rank = {n: rank for rank, n in enumerate(backward)}

    @cached_property
    def _readers(self) -> list[set[int]]:
        return readers_of(self.graph)

    def uses(self, node: int) -> tuple[int, int, int]:
        """Ranks in the two passes: last forward use, first and last in backward.

        What no operator of the forward reads waits from where it is made; what none of the
        backward reads is let go at its end.
        """
        used = self._readers[node]
        last = max((self._forward_rank[r] for r in used if r in self._forward_rank), default=0)
        ranks = [self._backward_rank[r] for r in used if r in self._backward_rank]
        end = len(self.backward_s) - 1
        last_forward = max(last, self._forward_rank.get(node, 0))
        return last_forward, min(ranks, default=end), max(ranks, default=end)

    def making(self, nodes: Sequence[int]) -> tuple[float, set[int]]:
        """Seconds to make nodes again from what else is kept, and which of it they are made of."""
        choices = self.choices
        if not all(choices.can_run[n] for n in nodes):
            return NEVER_S, set()
        seconds, sources, again, stack = 0.0, set[int](), set(nodes), list(nodes)
        while stack:
            node = stack.pop()
            seconds += self._again_s[node]
            for source in choices.sources[node]:
                kept = source in self.kept and choices.can_save[source]
                if (kept or not choices.can_run[source]) and source not in again:
                    sources.add(source)
                elif source not in again:
                    again.add(source)
                    stack.append(source)
        return seconds, sources

    def saved(self, recomputed: Iterable[int]) -> frozenset[int]:
        """What must be saved when these nodes are not."""
        left_out = frozenset(recomputed)
        return self.choices.point(self.kept - left_out).saved if left_out else self.kept


def segments_of(simulator: Simulator) -> list[Segment]:
    """One for each joint graph of the profile."""
    profile = simulator.profile
    factors = [known.factor for known in profile.known] or [1.0] * len(profile.graphs)
    return [
        Segment(graph, factor, simulator.min_tensor_bytes)
        for graph, factor in zip(profile.graphs, factors, strict=True)
    ]


def gather(simulator: Simulator, segments: Sequence[Segment]) -> Gathered:
    """The operators of the step and all that can be decided about."""
    return _Gatherer(simulator, segments).gathered()


class _Gatherer:
    def __init__(self, simulator: Simulator, segments: Sequence[Segment]) -> None:
        self.simulator, self.segments = simulator, segments
        self.calls = simulator.graph.calls
        copies = simulator.copies
        self.order = tuple(copies.order)
        forward = [
            _spread(
                copies.forward_s[c.index], [0.0] if c.graph < 0 else segments[c.graph].forward_s
            )
            for c in self.calls
        ]
        graphs = [self.calls[c].graph for c in self.order]
        backward = [
            _spread(copies.backward_s[c], [0.0] if graph < 0 else segments[graph].backward_s)
            for c, graph in zip(self.order, graphs, strict=True)
        ]
        self.seconds = tuple(s for operators in (*forward, *backward) for s in operators)
        self.forward_start = list(accumulate(map(len, forward), initial=0))
        self.starts = tuple(accumulate(map(len, backward), initial=self.forward_start[-1]))
        self.backward_start = dict(zip(self.order, self.starts, strict=False))

    def gathered(self) -> Gathered:
        groups = self._groups()
        number_of = {place: i for i, group in enumerate(groups) for place in group}
        candidates = tuple(self._candidate(group, number_of) for group in groups)
        step = Step(self.seconds, self.forward_start[-1], candidates)
        return Gathered(step, tuple(groups), self.order, self.starts)

    def _groups(self) -> list[tuple[Place, ...]]:
        """Places that share memory, large enough to be decided about, by where they stand first."""
        group_of: dict[tuple[str, int, int], list[Place]] = {}
        for call in self.calls:
            if call.graph < 0 or call.need < 0:
                continue
            for node in sorted(self.segments[call.graph].kept):
                place = (call.index, node)
                members = [place]
                for key in self._memory(call, node):
                    known = group_of.get(key, [])
                    members = known + [p for p in members if p not in known]
                    for other in self._keys(members):
                        group_of[other] = members
        smallest = max(self.simulator.min_tensor_bytes, 1)
        distinct = {id(members): tuple(members) for members in group_of.values()}
        return [group for group in distinct.values() if self._bytes(group) >= smallest]

    def _keys(self, places: Iterable[Place]) -> Iterator[tuple[str, int, int]]:
        for call, node in places:
            yield from self._memory(self.calls[call], node)

    def _memory(self, call: Call, node: int) -> list[tuple[str, int, int]]:
        """The memory that a saved node holds: blocks of the step, or storages of its call.

        Nothing for memory that is there all the time.
        """
        graph = self.segments[call.graph].graph
        outside: dict[int, int] = {}
        for i in graph.held_outside((node,)):
            at = call.held.get(graph.nodes[i].name, -1)
            outside.update(dict.fromkeys(graph.nodes[i].storages, at))
        found = []
        for storage in graph.nodes[node].storages:
            if graph.nodes[graph.storages[storage].maker].role == "parameter":
                continue
            block = outside.get(storage)
            if block is None:
                found.append(("storage", call.index, storage))
            elif block >= 0:
                found.append(("block", block, 0))
        return found

    def _bytes(self, group: Sequence[Place]) -> int:
        sizes: dict[tuple[str, int, int], int] = {}
        for call, node in group:
            for kind, owner, storage in self._memory(self.calls[call], node):
                sizes[kind, owner, storage] = (
                    int(self.simulator.bytes[owner])
                    if kind == "block"
                    else self.segments[self.calls[call].graph].graph.storages[storage].bytes
                )
        return sum(sizes.values())

    def _candidate(self, group: Sequence[Place], number_of: dict[Place, int]) -> Candidate:
        size = self._bytes(group)
        forward, first, last = [], [], []
        for call, node in group:
            uses = self.segments[self.calls[call].graph].uses(node)
            forward.append(self.forward_start[call] + uses[0])
            first.append(self.backward_start[call] + uses[1])
            last.append(self.backward_start[call] + uses[2])
        recompute_s, sources = self._recomputing(group)
        swap_s, drag_s = self._swapping(group, size)
        call, node = group[0]
        name = self.segments[self.calls[call].graph].graph.nodes[node].name
        return Candidate(
            name=f"{self.calls[call].name}/{name}",
            bytes=size,
            last_forward=max(forward),
            first_backward=min(first),
            last_backward=max(last),
            recompute_s=recompute_s,
            sources=tuple(sorted({number_of[p] for p in sources if p in number_of})),
            swap_s=swap_s,
            drag_s=drag_s,
            due=min(self.backward_start[call] for call, _ in group),
        )

    def _recomputing(self, group: Sequence[Place]) -> tuple[float, list[Place]]:
        """Seconds and sources; what several calls keep cannot be made again by one of them."""
        calls = {call for call, _ in group}
        if len(calls) > 1 or not self.simulator.recompute:
            return NEVER_S, []
        (call,) = calls
        seconds, sources = self.segments[self.calls[call].graph].making([n for _, n in group])
        return seconds, [(call, node) for node in sources]

    def _swapping(self, group: Sequence[Place], size: int) -> tuple[float, float]:
        """Seconds of the copy back, and what the copies take from the work beside them."""
        simulator, copy = self.simulator, self.simulator.copy
        graphs = ((self.segments[self.calls[c].graph].graph, n) for c, n in group)
        single = all(len(graph.nodes[n].storages) == 1 for graph, n in graphs)
        if copy is None or not single or size < simulator.smallest_move_bytes:
            return NEVER_S, 0.0
        hides = simulator.copies.overlap
        drag_s = copy.drag * round_trip_s(copy, size, 1)
        return simulator.copies.in_seconds(size, 1) if hides else 0.0, drag_s


def _spread(total_s: float, seconds: Sequence[float]) -> list[float]:
    """The seconds of a call shared out among its operators, by what they take alone.

    What was measured of the call counts: operators by themselves take longer or shorter.
    """
    known_s = sum(seconds)
    if known_s <= 0:
        return [total_s / len(seconds)] * len(seconds)
    return [total_s * s / known_s for s in seconds]
