"""Which of a segment's saved tensors are worth offering to move to the host, and what that takes.

Every byte of a lane costs the same, so of the tensors a variant saves the largest go first: fewer
copies for the bytes. Offered are all of them and the larger half, for the variants that keep most
and a few leaner ones. Limits: calls that share a menu mix these; other subsets are not offered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from memfit.ir.joint_graph import JointGraph, Variant
from memfit.ir.profile import CopyRates
from memfit.planning.segment.passes import movable, saved_storages, storage_bytes

MAX_BASES = 5  # variants that are offered with moves, too

Row = tuple[Variant, float]


def smallest_move_bytes(copy: CopyRates, min_tensor_bytes: int) -> int:
    """Bytes that take as long to copy as a copy takes to start: smaller tensors stay."""
    rate = min(copy.out_bytes_per_s, copy.in_bytes_per_s)
    return max(min_tensor_bytes, int(copy.latency_s * rate), 1)


def round_trip_s(copy: CopyRates, size: int, tensors: int) -> float:
    """Seconds of both lanes together for so many bytes."""
    rate_s = 1 / copy.out_bytes_per_s + 1 / copy.in_bytes_per_s
    return size * rate_s + 2 * tensors * copy.latency_s


def copy_seconds(graph: JointGraph, moved: Sequence[int], copy: CopyRates) -> float:
    """Seconds of both lanes together for the memory of these nodes."""
    storages = saved_storages(graph, moved)
    return round_trip_s(copy, storage_bytes(graph, storages), len(storages))


def offered_moves(
    graph: JointGraph,
    rows: Sequence[Row],
    copy: CopyRates,
    min_tensor_bytes: int,
    staying: Collection[int],
) -> Iterator[tuple[Row, tuple[int, ...]]]:
    """Rows of a menu with the nodes to move: all that are large enough, and the larger half.

    Nodes in `staying` are no use to move.
    """
    smallest = smallest_move_bytes(copy, min_tensor_bytes)
    step = max(1, (len(rows) - 1) // (MAX_BASES - 1) if MAX_BASES > 1 else len(rows))
    for row in rows[::step][:MAX_BASES]:
        groups = movable(graph, row[0], smallest, staying)
        if not groups:
            continue
        yield row, tuple(n for group in groups for n in group)
        sizes = [graph.storages[graph.nodes[g[0]].storages[0]].bytes for g in groups]
        half = next(i for i in range(1, len(sizes) + 1) if 2 * sum(sizes[:i]) >= sum(sizes))
        if half < len(groups):
            yield row, tuple(n for group in groups[:half] for n in group)
