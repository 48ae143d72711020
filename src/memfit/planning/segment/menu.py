"""The menu of a segment: the ways to run it that are worth choosing from.

Candidates are the lower convex hull of bytes against seconds (`mincut`), points between its corners
by 0/1 programs with a cap on bytes (HiGHS through scipy) where it has holes, and the variant that
recomputes all it can. Each is then followed step by step (`passes`), and those stay that no other
beats in bytes held, in both peaks and in seconds.

What holds, where no two nodes that can be saved share a storage and `min_tensor_bytes` is 0: the
first variant has the least seconds there are and the least bytes of those; each of the others, save
`extra` ones and the one that recomputes all it can, has the least seconds of all saved sets that
hold as few bytes. Limits: peaks are not minimised, only compared; of a segment of more than
`EXACT_NODES` the points between corners may be `REL_GAP` off, and so may those of a program that
was stopped.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
from scipy.optimize import Bounds, LinearConstraint
from scipy.sparse import csr_array

from memfit.ir.joint_graph import JointGraph, Variant
from memfit.planning.segment.mincut import Choices, Point, hull, undominated
from memfit.planning.segment.passes import total_bytes, variant_of
from memfit.planning.solver import solve_milp

MAX_VARIANTS = 16
# A gap between neighbours wider than this share of the first variant's bytes is a hole.
HOLE = 0.1
MAX_PROGRAM_NODES = 1500
# Larger programs may be this share off the best; seconds that are alike make the last bit long.
EXACT_NODES = 150
REL_GAP = 0.01
# Ends a hopeless search at the same place on every machine, as the time limit would not.
MAX_BRANCHES = 2000
# Of two answers with the same seconds the one with fewer bytes: all bytes weigh as much as this
# share of all seconds.
BYTES_WEIGHT = 1e-6


Saved = frozenset[int]
Costs = tuple[float, int, int, int]
T = TypeVar("T")


def menu_of(
    graph: JointGraph,
    *,
    min_tensor_bytes: int = 0,
    time_limit_s: float = 10.0,
    extra: Sequence[Variant] = (),
) -> tuple[Variant, ...]:
    """Variants that none beats: first the one that keeps most, the others by rising seconds.

    Nodes smaller than `min_tensor_bytes` are kept wherever they are read. `extra` variants compete,
    and stand for a computed one with the same saved set. The time limit is for filling holes.
    """
    choices = Choices(graph, min_tensor_bytes=min_tensor_bytes)
    points = frontier(choices, time_limit_s=time_limit_s)
    candidates = _spread(points, [p.bytes for p in points])
    candidates.append(choices.point((), keep_small=False))
    variants = {p.saved: variant_of(graph, p.saved) for p in candidates}
    variants.update((frozenset(v.saved), v) for v in extra)
    costs = {saved: _costs(graph, variant) for saved, variant in variants.items()}
    best = sorted(_unbeaten(costs), key=lambda saved: (*costs[saved], sorted(saved)))
    keep = points[0].saved if points[0].saved in best else best[0]
    best.remove(keep)
    best.sort(key=lambda saved: -costs[saved][1])
    rest = _spread(best, [costs[saved][1] for saved in best], MAX_VARIANTS - 1)
    rest.sort(key=lambda saved: (*costs[saved], sorted(saved)))
    return tuple(variants[saved] for saved in (keep, *rest))


def frontier(choices: Choices, *, time_limit_s: float = 10.0) -> tuple[Point, ...]:
    """Points with the least seconds for their bytes, by falling bytes, holes filled in time."""
    deadline = time.monotonic() + time_limit_s
    points = hull(choices)
    if len(choices.nodes) > MAX_PROGRAM_NODES:
        return points
    found = list(points)
    program: _Program | None = None
    for left, right in pairwise(points):
        lowest = left.bytes
        for cap in _caps(left.bytes, right.bytes, HOLE * points[0].bytes):
            if cap >= lowest:  # the answer to a higher cap is the answer to this one too
                continue
            program = program or _Program(choices)
            point = program.solve(cap, deadline - time.monotonic())
            if point is None:
                return undominated(found)
            found.append(point)
            lowest = point.bytes
    return undominated(found)


def _caps(high: int, low: int, step: float) -> Iterator[int]:
    """Byte caps that cut a gap into parts of at most `step`, from high to low."""
    parts = math.ceil((high - low) / step) if step else 0
    for part in range(1, parts):
        yield high - (high - low) * part // parts


class _Program:
    """Least seconds with at most so many bytes: a column per node to save and to run again."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.save: dict[int, int] = {}
        self.run: dict[int, int] = {}
        self.columns = 0
        for node in choices.nodes:
            if choices.can_save[node]:
                self.save[node] = self._column()
            if choices.can_run[node]:
                self.run[node] = self._column()
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        bytes_at = self._storages()
        self._needs()
        self.bytes = np.zeros(self.columns)
        self.seconds = np.zeros(self.columns)
        for column, size in bytes_at.items():
            self.bytes[column] = size
        for node, column in self.run.items():
            self.bytes[column] = choices.state_bytes(node)
            self.seconds[column] = choices.graph.again_seconds[node]
        # What is run again follows from what is saved, and nothing of no bytes is half saved.
        self.integral = np.zeros(self.columns)
        self.integral[[c for n, c in self.save.items() if choices.bytes_of(n)]] = 1

    def _column(self) -> int:
        self.columns += 1
        return self.columns - 1

    def _row(self, positive: Iterable[int], negative: Iterable[int], low: float) -> None:
        row = len(self.low)
        self.entries.extend((row, column, 1.0) for column in positive)
        self.entries.extend((row, column, -1.0) for column in negative)
        self.low.append(low)

    def _storages(self) -> dict[int, int]:
        """Bytes by column: that of the one node that saves a storage, or one of the storage's."""
        graph, savers = self.choices.graph, dict[int, list[int]]()
        for node in self.save:
            if self.choices.bytes_of(node):
                for storage in graph.nodes[node].storages:
                    savers.setdefault(storage, []).append(node)
        bytes_at: dict[int, int] = {}
        for storage, nodes in savers.items():
            column = self.save[nodes[0]] if len(nodes) == 1 else self._column()
            bytes_at[column] = bytes_at.get(column, 0) + graph.storages[storage].bytes
            for node in nodes if len(nodes) > 1 else ():
                self._row([column], [self.save[node]], 0.0)
        return bytes_at

    def _needs(self) -> None:
        """Rows: what is needed is there, and so are the sources of what is run again."""
        for node in self.choices.needed:
            self._row(self._there(node), [], 1.0)
        for node, column in self.run.items():
            for source in dict.fromkeys(self.choices.sources[node]):
                self._row(self._there(source), [column], 0.0)

    def _there(self, node: int) -> list[int]:
        return [columns[node] for columns in (self.save, self.run) if node in columns]

    def solve(self, cap: int, time_limit_s: float) -> Point | None:
        """The point with the least seconds in at most `cap` bytes; None when time is up."""
        if time_limit_s <= 0:
            return None
        table = np.array(self.entries).reshape(-1, 3)
        places = (table[:, 0].astype(int), table[:, 1].astype(int))
        needs = csr_array((table[:, 2], places), shape=(len(self.low), self.columns))
        seconds, held = self.seconds / self.seconds.sum(), self.bytes / self.bytes.sum()
        exact = len(self.choices.nodes) <= EXACT_NODES
        result = solve_milp(
            1e4 * (seconds + BYTES_WEIGHT * held),  # the solver's gaps are absolute as well
            integrality=self.integral,
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(needs, self.low, np.inf),
                LinearConstraint(self.bytes[None, :] / cap, -np.inf, 1.0),
            ],
            options={
                "time_limit": time_limit_s,
                "node_limit": MAX_BRANCHES,
                "mip_rel_gap": 0.0 if exact else REL_GAP,
            },
        )
        if result.x is None:
            return None
        return self.choices.point(n for n, column in self.save.items() if result.x[column] > 0.5)


def _costs(graph: JointGraph, variant: Variant) -> Costs:
    """What variants are compared by, seconds first; what is held counts in backward, too."""
    total = total_bytes(graph, variant)
    return (
        variant.seconds,
        total,
        total + variant.backward_peak_bytes,
        variant.forward_peak_bytes,
    )


def _unbeaten(costs: dict[Saved, Costs]) -> list[Saved]:
    """Saved sets that no other is at most as costly as in all; of equals the last one given."""
    kept: list[Saved] = []
    for saved, cost in reversed(costs.items()):
        rivals = [costs[k] for k in kept] + [c for c in costs.values() if c != cost]
        if not any(all(map(operator.le, rival, cost)) for rival in rivals):
            kept.append(saved)
    return kept


def _spread(ordered: Sequence[T], sizes: Sequence[int], count: int = MAX_VARIANTS) -> list[T]:
    """At most `count` of what is given by falling sizes: both ends and what leaves small gaps."""
    kept = list(range(len(ordered)))
    while len(kept) > count:
        # The one whose neighbours are nearest to each other is missed least.
        inner = range(1, len(kept) - 1)
        drop = min(inner, key=lambda k: (sizes[kept[k - 1]] - sizes[kept[k + 1]], -k))
        del kept[drop]
    return [ordered[k] for k in kept]
