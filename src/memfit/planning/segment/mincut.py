"""The saved sets that are best for a price: bytes held against seconds of recompute.

A saved set and what the backward then runs again are a cut of a network (as in the partitioner of
PyTorch's AOTAutograd, but with finite costs of recompute): saving pays the price of its bytes,
running again pays seconds. The cheapest cuts over all prices are the lower convex hull of the
points (bytes, seconds); it is found by solving between two known points at the price of the line
through them. Points off the hull are not found here.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from memfit.ir.joint_graph import JointGraph
from memfit.planning.segment.passes import saved_storages, storage_bytes

# scipy's flows are 32 bits wide and wrap around without a word. Costs are scaled so that a known
# cut costs at most KNOWN_COST: the least cut is below it and no flow gets near to ENDLESS.
KNOWN_COST = 2**30
ENDLESS = 2**31 - 1
# A point counts as below a line when it is so by this share: less is rounding.
BELOW = 1e-7
# Gaps narrower than this share of all bytes are not looked into, and no more cuts than MAX_CUTS
# made: on large graphs the hull has thousands of points.
NARROW = 1 / 64
MAX_CUTS = 40


@dataclass(frozen=True)
class Point:
    """A saved set, the bytes it is priced at and the seconds of what is then run again."""

    saved: frozenset[int]
    bytes: int
    seconds: float


class Choices:
    """What may be saved and what may run again, of the nodes that the backward can come to need.

    Parameters are left out: to have them costs nothing. The backward reads `needed`, and a node can
    be run again where its `sources` are. `small` nodes are priced at no bytes and saved wherever
    they are read. `forced` ones can only be run again, whatever is saved.
    """

    def __init__(self, graph: JointGraph, *, min_tensor_bytes: int = 0) -> None:
        self.graph = graph
        nodes = graph.nodes
        self.can_save = [n.can_save or n.role == "input" for n in nodes]
        self.can_run = [False] * len(nodes)
        for i, n in enumerate(nodes):  # sources stand before their readers
            self.can_run[i] = (
                n.role == "forward" and n.can_recompute and all(map(self.can_have, n.inputs))
            )
        self.needed = [i for i in graph.needed if not self.is_free(i)]
        self.sources = [[i for i in n.inputs if not self.is_free(i)] for n in nodes]
        self.nodes = self._reachable()
        self.small = {
            i for i in self.nodes if self.can_save[i] and nodes[i].bytes < min_tensor_bytes
        }
        self.forced = self._walk(set(self.nodes))[1]
        self.forced_seconds = sum(graph.again_seconds[i] for i in sorted(self.forced))

    def can_have(self, node: int) -> bool:
        """Whether the backward can get at the node at all."""
        return self.can_save[node] or self.can_run[node] or self.is_free(node)

    def is_free(self, node: int) -> bool:
        """Whether to have the node costs nothing."""
        return self.graph.nodes[node].role == "parameter"

    def _reachable(self) -> tuple[int, ...]:
        """Nodes that are needed when as much as can be is run again."""
        seen: set[int] = set()
        stack = list(self.needed)
        for node in stack:
            if not self.can_have(node):
                name = self.graph.nodes[node].name
                raise ValueError(f"{name} is needed, and can neither be saved nor recomputed")
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack.extend(self.sources[node] if self.can_run[node] else ())
        return tuple(sorted(seen))

    def point(self, saved: Iterable[int], *, keep_small: bool = True) -> Point:
        """The point of a saved set, less what nothing reads, plus what cannot be run again."""
        used, again = self._walk(set(saved) | (self.small if keep_small else set()))
        held = storage_bytes(self.graph, saved_storages(self.graph, used - self.small))
        return Point(
            frozenset(used),
            held + sum(self.state_bytes(n) for n in again),
            sum(self.graph.again_seconds[n] for n in sorted(again)),
        )

    def _walk(self, wanted: set[int]) -> tuple[set[int], set[int]]:
        """Nodes the backward reads from what is saved, and those it runs again."""
        used: set[int] = set()
        again: set[int] = set()
        stack = list(self.needed)
        while stack:
            node = stack.pop()
            if node in used or node in again:
                continue
            if self.can_save[node] and (node in wanted or not self.can_run[node]):
                used.add(node)
            else:
                again.add(node)
                stack.extend(self.sources[node])
        return used, again

    def bytes_of(self, node: int) -> int:
        """Bytes that saving the node alone is priced at."""
        if node in self.small:
            return 0
        return storage_bytes(self.graph, saved_storages(self.graph, (node,)))

    def state_bytes(self, node: int) -> int:
        """Bytes that running the node again is priced at."""
        value = self.graph.nodes[node]
        return value.state_bytes if value.random else 0


def hull(choices: Choices) -> tuple[Point, ...]:
    """Points of the lower convex hull, by falling bytes; the first has the least seconds.

    It is the whole hull unless that has gaps narrower than `NARROW` or takes more than `MAX_CUTS`.
    """
    network = _Network(choices)
    anything = choices.point(choices.nodes)
    first = network.cut(np.inf, 1.0, anything.bytes)
    last = network.cut(0.0, 1.0, first.bytes)
    narrow = NARROW * (first.bytes - last.bytes)
    found = {first, last}
    gaps = _gaps(narrow, first, last)
    for _ in range(MAX_CUTS):
        if not gaps:
            break
        _, _, left, right = heapq.heappop(gaps)
        price = (right.seconds - left.seconds) / (left.bytes - right.bytes)
        line = _cost(choices, left, price)
        middle = network.cut(1.0, price, line)
        inside = right.bytes <= middle.bytes < left.bytes
        if inside and _cost(choices, middle, price) < line * (1 - BELOW):
            found.add(middle)
            for gap in _gaps(narrow, left, middle, right):
                heapq.heappush(gaps, gap)
    return undominated(found)


def undominated(points: Iterable[Point]) -> tuple[Point, ...]:
    """The points that none has at most the bytes and at most the seconds of, by falling bytes."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.bytes, p.seconds, sorted(p.saved))):
        if not best or point.seconds < best[-1].seconds:
            best.append(point)
    return tuple(reversed(best))


def _cost(choices: Choices, point: Point, price: float) -> float:
    """Seconds of the point that there was a choice about, and its bytes at a price."""
    return point.seconds - choices.forced_seconds + price * point.bytes


def _gaps(narrow: float, *points: Point) -> list[tuple[int, int, Point, Point]]:
    """Heap entries of the gaps between neighbours worth a look, the widest first."""
    return sorted(
        (right.bytes - left.bytes, right.bytes, left, right)
        for left, right in pairwise(points)
        if left.bytes - right.bytes > narrow and right.seconds > left.seconds
    )


class _Network:
    """The network whose cuts are saved sets.

    Each node has a vertex "there" on the sink's side when the backward has its value, and, where
    there is a choice, a vertex "run" on the sink's side when it is run again. The edge from the
    source to "run" costs seconds, the edge from "run" to "there" the bytes of saving; endless edges
    make what runs have its sources. Savable nodes that cannot be run again share one edge for each
    storage. Limit: where a node that can be run again shares its storage with another savable one,
    both pay for it.
    """

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.there = {n: 2 + k for k, n in enumerate(choices.nodes)}  # 0: source, 1: sink
        self.run: dict[int, int] = {}
        self.vertices = 2 + len(self.there)
        self.edges: list[tuple[int, int, float, float]] = []  # from, to, seconds, bytes
        gates: dict[tuple[int, ...], int] = {}
        for node in choices.nodes:
            if choices.can_run[node]:
                self._add_run(node)
            else:
                storages = choices.graph.nodes[node].storages if node not in choices.small else ()
                gate = gates.get(storages)
                if gate is None:
                    gate = gates[storages] = self._vertex()
                    self.edges.append((0, gate, 0.0, choices.bytes_of(node)))
                self.edges.append((gate, self.there[node], np.inf, 0.0))
        self.edges.extend((self.there[n], 1, np.inf, 0.0) for n in choices.needed)
        self.most_savers = self._most_savers()
        table = np.array(self.edges, dtype=float).reshape(-1, 4)
        self.ends = table[:, :2].astype(np.int32)
        self.seconds, self.bytes = table[:, 2], table[:, 3]

    def _most_savers(self) -> int:
        """How many times a storage may be paid for."""
        nodes = self.choices.graph.nodes
        savers = Counter(
            storage
            for node in self.choices.nodes
            if self.choices.can_save[node] and node not in self.choices.small
            for storage in nodes[node].storages
        )
        return max(savers.values(), default=1)

    def _vertex(self) -> int:
        self.vertices += 1
        return self.vertices - 1

    def _add_run(self, node: int) -> None:
        choices, there = self.choices, self.there[node]
        run = self.run[node] = self._vertex() if choices.can_save[node] else there
        if run != there:
            self.edges.append((run, there, 0.0, choices.bytes_of(node)))
        if node not in choices.forced:
            seconds = choices.graph.again_seconds[node]
            self.edges.append((0, run, seconds, choices.state_bytes(node)))
        # A node may be read twice by the same operator; scipy would add the two edges up.
        for source in dict.fromkeys(choices.sources[node]):
            self.edges.append((self.there[source], run, np.inf, 0.0))

    def cut(self, seconds_weight: float, bytes_weight: float, known_cost: float) -> Point:
        """The point of least weighted cost, which is at most `known_cost`.

        Of several the one nearest to the backward: it runs the fewest nodes again.
        """
        known = known_cost * self.most_savers
        capacity = self._capacity(seconds_weight, bytes_weight, known)
        shape = (self.vertices, self.vertices)
        graph = csr_array((capacity, (self.ends[:, 0], self.ends[:, 1])), shape=shape)
        rest = (graph - maximum_flow(graph, 0, 1).flow).T.tocsr()
        rest.eliminate_zeros()
        sink_side = set(breadth_first_order(rest, 1, return_predecessors=False).tolist())
        return self.choices.point(
            node
            for node, there in self.there.items()
            if there in sink_side and self.run.get(node, 0) not in sink_side
        )

    def _capacity(self, seconds_weight: float, bytes_weight: float, known: float) -> np.ndarray:
        """The edges' costs as integers: none but zero becomes zero, none is past `ENDLESS`."""
        cost = bytes_weight * self.bytes
        timed = (self.seconds > 0) & (seconds_weight > 0)
        cost[timed] += seconds_weight * self.seconds[timed]
        cost[np.isinf(self.seconds)] = np.inf
        scale = KNOWN_COST / known if known > 0 else 1.0
        if scale > 1:
            scale = np.floor(scale)  # whole bytes stay whole
        whole = np.minimum(np.rint(cost * scale), ENDLESS)
        whole[(cost > 0) & (whole < 1)] = 1
        return whole.astype(np.int32)
