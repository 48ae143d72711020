"""The menu of a segment: the ways to run it that are worth choosing from.

Candidates are the lower convex hull of bytes against seconds (`mincut`), points between its corners
by programs with a cap on seconds (`capped`), and the variant that recomputes all it can. Each is
then followed step by step (`passes`), and those stay that no other beats in bytes held, in both
peaks and in seconds; of more than its `Limits` allow those are dropped that are missed least.

What holds, where no two nodes that can be saved share a storage and `min_tensor_bytes` is 0: the
first variant has the least seconds there are and the least bytes of those; each of the others, save
`extra` ones and the one that recomputes all it can, has the least seconds of all saved sets that
hold as few bytes. Limits: peaks are not minimised, only compared; points between corners are as
good as `capped` says; and between two variants of a menu there can be saved sets worth choosing for
one call alone. Calls that share a menu come near to those by taking different variants; the more of
a step is one call, the more variants it is given.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeVar

from memfit.ir.joint_graph import JointGraph, Variant
from memfit.planning.segment.capped import EXACT_NODES, CappedProgram
from memfit.planning.segment.mincut import Choices, Point, hull, undominated
from memfit.planning.segment.passes import total_bytes, variant_of

MAX_VARIANTS = 16
MAX_VARIANTS_ALONE = 64  # of a step that is one call
# Gaps of less than this share of all seconds between the ends are left alone.
NARROW = 0.001
PROGRAMS_PER_VARIANT = 1.25  # what more programs find is thinned out again
MAX_PROGRAM_NODES = 1500
# Of the bytes times seconds that there are to win in all segments.
WORTH_A_VARIANT = 2e-3
WORTH_A_VARIANT_ALONE = 2e-4

Saved = frozenset[int]
Costs = tuple[float, int, int, int]
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """How many variants a menu has at most, and how much of what there is to win in the graph makes
    it worth to look for one more."""

    variants: int = MAX_VARIANTS
    worth: float = 0.0

    @property
    def programs(self) -> int:
        """How many programs may be solved."""
        return int(PROGRAMS_PER_VARIANT * self.variants)


USUAL = Limits()


def limits_for(one_call: float, all_calls: float) -> Limits:
    """The limits for a graph by what one of its calls and all of them have of what there is to win.

    Where a step has many graphs, most of them matter little. Many calls mix variants, and need few;
    a step that is one call has to have the right one.
    """
    if not all_calls:
        return USUAL
    worth = WORTH_A_VARIANT + (WORTH_A_VARIANT_ALONE - WORTH_A_VARIANT) * one_call
    return Limits(max(MAX_VARIANTS, int(MAX_VARIANTS_ALONE * one_call)), worth / all_calls)


def menu_of(
    graph: JointGraph,
    *,
    min_tensor_bytes: int = 0,
    limits: Limits = USUAL,
    extra: Sequence[Variant] = (),
) -> tuple[Variant, ...]:
    """Variants that none beats: first the one that keeps most, the others by rising seconds.

    Nodes smaller than `min_tensor_bytes` are kept wherever they are read. `extra` variants compete,
    and stand for a computed one with the same saved set.
    """
    points, candidates = _candidates(graph, min_tensor_bytes, limits)
    variants = {p.saved: variant_of(graph, p.saved) for p in candidates}
    variants.update((frozenset(v.saved), v) for v in extra)
    costs = {saved: _costs(graph, variant) for saved, variant in variants.items()}
    best = sorted(_unbeaten(costs), key=lambda saved: (*costs[saved], sorted(saved)))
    keep = points[0].saved if points[0].saved in best else best[0]
    best.remove(keep)
    best.sort(key=lambda saved: (-costs[saved][1], costs[saved]))
    leanest = {min(best, key=lambda saved: costs[saved][by]) for by in (2, 3)} if best else set()
    sizes = [(costs[saved][1], costs[saved][0]) for saved in best]
    needed = [i for i, saved in enumerate(best) if saved in leanest]
    rest = _thinned(best, sizes, limits.variants - 1, needed)
    rest.sort(key=lambda saved: (*costs[saved], sorted(saved)))
    return tuple(variants[saved] for saved in (keep, *rest))


@lru_cache(maxsize=64)
def _candidates(
    graph: JointGraph, min_tensor_bytes: int, limits: Limits
) -> tuple[tuple[Point, ...], list[Point]]:
    """The frontier, and the points of it to choose from with the one that recomputes all it can.

    What is measured of variants changes neither, and to find them takes longest.
    """
    choices = Choices(graph, min_tensor_bytes=min_tensor_bytes)
    points = frontier(choices, limits)
    candidates = _thinned(points, [(p.bytes, p.seconds) for p in points], limits.variants)
    return points, [*candidates, choices.point((), keep_small=False)]


def frontier(
    choices: Choices, limits: Limits = USUAL, *, time_limit_s: float = 10.0
) -> tuple[Point, ...]:
    """Points with the least seconds for their bytes, by falling bytes.

    Gaps between the corners of the hull are filled where most may be won, while time is left; not
    those where less than the share `limits.worth` of all there is may be.
    """
    deadline = time.process_time() + time_limit_s
    points = hull(choices)
    first, last = points[0], points[-1]
    least = limits.worth * _Gap(first.bytes, last.bytes, first.seconds, last.seconds).area
    found = list(points)
    gaps = [_Gap(a.bytes, b.bytes, a.seconds, b.seconds) for a, b in pairwise(points)]
    if len(choices.nodes) > MAX_PROGRAM_NODES:
        return points
    program: CappedProgram | None = None
    # Of large graphs more points would be no more exact, and take long.
    exact = len(choices.nodes) <= EXACT_NODES
    narrow_s = NARROW * (last.seconds - first.seconds)
    for _ in range(limits.programs if exact else USUAL.programs):
        gaps = [gap for gap in gaps if gap.right_s - gap.left_s > narrow_s and gap.area > least]
        if not gaps:
            break
        gap = max(gaps, key=lambda gap: (gap.area, gap.high))
        gaps.remove(gap)
        cap_s = (gap.left_s + gap.right_s) / 2
        program = program or CappedProgram(choices)
        point = program.solve(cap_s, deadline - time.process_time())
        if point is None:
            break
        found.append(point)
        # From the point's seconds up to the cap nothing is better than the point.
        gaps.append(_Gap(gap.high, point.bytes, gap.left_s, point.seconds))
        gaps.append(_Gap(point.bytes, gap.low, cap_s, gap.right_s))
    return undominated(found)


class _Gap(NamedTuple):
    """Bytes and seconds between two points where no program was solved."""

    high: int
    low: int
    left_s: float
    right_s: float

    @property
    def area(self) -> float:
        """The most that a point in between could win: seconds, times the bytes it wins them at."""
        return (self.high - self.low) * (self.right_s - self.left_s)


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


def _thinned(
    ordered: Sequence[T],
    costs: Sequence[tuple[int, float]],
    count: int,
    needed: Collection[int] = (),
) -> list[T]:
    """At most `count` of what is given by falling bytes: both ends, what is needed, and of the
    rest those that are missed most; `costs` are bytes and seconds."""
    kept = list(range(len(ordered)))

    def missed(k: int) -> float:
        # Who has the bytes for it, and not for the one before it, gets the one after it. Seconds
        # grow a hundredfold along a menu: as they are, all choices would go to the dear end.
        before, at, after = (costs[kept[j]] for j in (k - 1, k, k + 1))
        return (before[0] - at[0]) * (math.sqrt(after[1]) - math.sqrt(at[1]))

    while len(kept) > count:
        inner = [k for k in range(1, len(kept) - 1) if kept[k] not in needed]
        del kept[min(inner, key=lambda k: (missed(k), -k))]
    return [ordered[k] for k in kept]
