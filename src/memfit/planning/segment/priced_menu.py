"""The menu of a joint graph: each variant with the seconds it adds, measured where they were.

What fused code adds is not one factor times what was reckoned: to make elementwise results again
may cost nothing, while products of matrices take what they took alone. So a variant that did not
run is taken to lie between those that ran, and beyond them each reckoned second counts as one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from memfit.ir.joint_graph import JointGraph, Variant
from memfit.ir.profile import CopyRates, Measurements
from memfit.planning.segment.menu import USUAL, Limits, menu_of, variant_of
from memfit.planning.segment.offload import copy_seconds, offered_moves
from memfit.planning.segment.passes import moving

Menu = tuple[tuple[Variant, float], ...]


@lru_cache(maxsize=64)
def priced_menu(
    graph: JointGraph,
    known: Measurements,
    min_tensor_bytes: int,
    copy: CopyRates | None,
    staying: frozenset[int],
    limits: Limits = USUAL,
) -> Menu:
    """The variants of a graph with their seconds; first the one that runs when nobody decides.

    Nodes in `staying` are no use to move: others keep their memory.
    """
    first = tuple(sorted(graph.unplanned))
    measured = {v.saved: v for v in known.variants}
    unplanned = measured.get(first) or variant_of(graph, first)
    base_s = _unplanned_seconds(graph)
    # A measured variant says what it adds; to compete with reckoned ones it is put on their scale.
    rivals = [replace(v, seconds=_reckoned(graph, v) + base_s) for v in known.variants]
    offered = menu_of(
        graph,
        min_tensor_bytes=min_tensor_bytes,
        limits=limits,
        extra=(*rivals, replace(unplanned, seconds=base_s)),
    )
    rows = [(unplanned, 0.0)]
    rows += [_priced(graph, known, v.saved) for v in offered if v.saved != first]
    if copy is not None:
        for (variant, seconds), moved in offered_moves(
            graph, rows, copy, min_tensor_bytes, staying
        ):
            rows.append(_with_moves(graph, variant, seconds, moved, copy))
    return tuple(rows)


def priced_variant(
    graph: JointGraph,
    known: Measurements,
    saved: tuple[int, ...],
    moved: tuple[int, ...],
    copy: CopyRates | None,
) -> tuple[Variant, float]:
    """A variant that need not be in the menu, with the seconds it adds to the unplanned one."""
    variant, seconds = _priced(graph, known, saved)
    if not moved:
        return variant, seconds
    assert copy is not None, "nothing can be moved"
    return _with_moves(graph, variant, seconds, moved, copy)


def _priced(
    graph: JointGraph, known: Measurements, saved: tuple[int, ...]
) -> tuple[Variant, float]:
    for variant in known.variants:
        if variant.saved == saved:
            return variant, variant.seconds
    variant = variant_of(graph, saved)
    if set(saved) == set(graph.unplanned):
        return variant, 0.0
    return variant, _likely_seconds(graph, known, _reckoned(graph, variant))


def _reckoned(graph: JointGraph, variant: Variant) -> float:
    """What a variant recomputes more than the unplanned one, operator by operator."""
    again_s = sum(graph.again_seconds[n] for n in variant.recomputed)
    return max(again_s - _unplanned_seconds(graph), 0.0)


def _likely_seconds(graph: JointGraph, known: Measurements, reckoned_s: float) -> float:
    """What so many reckoned seconds are likely to take, by what the variants that ran showed.

    Where none did, by the factor that those of other graphs showed.
    """
    ran = sorted((_reckoned(graph, v), v.seconds) for v in known.variants if v.measured)
    if not ran:
        return known.factor * reckoned_s
    at, seconds = zip((0.0, 0.0), *ran, strict=True)
    rising = np.maximum.accumulate(seconds)  # to recompute more does not take less
    return float(np.interp(reckoned_s, at, rising)) + max(reckoned_s - at[-1], 0.0)


def _unplanned_seconds(graph: JointGraph) -> float:
    """What the unplanned variant itself recomputes."""
    return sum(graph.again_seconds[n] for n in graph.recomputed(frozenset(graph.unplanned)))


def _with_moves(
    graph: JointGraph,
    variant: Variant,
    seconds: float,
    moved: Iterable[int],
    copy: CopyRates,
) -> tuple[Variant, float]:
    """The variant with some of what it saves moved: copies slow down what runs beside them."""
    away = moving(graph, variant, moved)
    return away, seconds + copy.drag * copy_seconds(graph, away.moved, copy)
