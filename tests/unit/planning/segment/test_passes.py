"""Memory and seconds of saved sets, by hand on small segments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.ir.joint_graph import JointGraph, Node, Span, Storage
from memfit.planning.segment.passes import total_bytes, variant_of

X, A, B, C, T, GC, GB, GA = range(8)


def _chain() -> JointGraph:
    """x -> a -> b -> c; each gradient reads the one before and the value it differentiates at."""
    sizes = (10, 4, 8, 2, 2, 8, 4, 10)
    forward = {"can_save": True, "can_recompute": True}
    nodes = (
        Node("x", "placeholder", "input", (), (X,)),
        Node("a", "f", "forward", (X,), (A,), seconds=1.0, **forward),
        Node("b", "g", "forward", (A,), (B,), seconds=2.0, **forward),
        Node("c", "h", "forward", (B,), (C,), seconds=3.0, **forward),
        Node("t", "placeholder", "tangent", (), (T,)),
        Node("gc", "hb", "backward", (T, B), (GC,)),
        Node("gb", "gb", "backward", (GC, A), (GB,)),
        Node("ga", "fb", "backward", (GB, X), (GA,)),
    )
    storages = tuple(Storage(size, maker) for maker, size in enumerate(sizes))
    return JointGraph("chain", "Chain", nodes, storages, outputs=(C,), gradients=(GA,))


def _with(graph: JointGraph, node: int, **changes: object) -> JointGraph:
    nodes = list(graph.nodes)
    nodes[node] = replace(nodes[node], **changes)  # type: ignore[arg-type]
    return replace(graph, nodes=tuple(nodes))


def test_a_chain_that_keeps_all() -> None:
    variant = variant_of(_chain(), (X, A, B))
    assert variant.recomputed == () and variant.seconds == 0.0
    assert variant.held_bytes == 12 and total_bytes(_chain(), variant) == 22
    assert variant.forward == (Span(A, 4, 0, -1), Span(B, 8, 1, -1), Span(C, 2, 2, -1))
    assert variant.forward_peak_bytes == 14
    assert variant.backward == (
        Span(A, 4, -1, 2),
        Span(B, 8, -1, 1),
        Span(T, 2, -1, 1),
        Span(GC, 8, 0, 2),
        Span(GB, 4, 1, 3),
        Span(GA, 10, 2, -1),
    )
    assert variant.backward_peak_bytes == 8  # 14 at the start, 22 while gc is made


def test_a_chain_that_recomputes_all() -> None:
    variant = variant_of(_chain(), (X,))
    assert variant.recomputed == (A, B) and variant.seconds == 3.0
    assert variant.held_bytes == 0 and total_bytes(_chain(), variant) == 10
    assert variant.forward_peak_bytes == 12  # a and b
    # t 2; a 6; b 14; gc 22; then t and b are gone: 16; gb and ga 14
    assert variant.backward_peak_bytes == 20
    assert Span(A, 4, 0, 4) in variant.backward and Span(B, 8, 1, 3) in variant.backward


def test_a_saved_output_is_held_but_no_span_of_the_backward() -> None:
    graph = _with(_chain(), GC, inputs=(T, B, C))
    variant = variant_of(graph, (X, A, B, C))
    assert variant.held_bytes == 12 and total_bytes(graph, variant) == 24
    assert C not in {span.storage for span in variant.backward}


def test_a_recomputed_output_is_new_memory_in_the_backward() -> None:
    graph = _with(_chain(), GC, inputs=(T, B, C))
    variant = variant_of(graph, (X, A, B))
    assert variant.recomputed == (C,) and Span(C, 2, 0, 2) in variant.backward


def test_what_nobody_reads_is_there_at_the_start_only() -> None:
    graph = _with(_chain(), GC, inputs=(T,))
    assert Span(B, 8, -1, 0) in variant_of(graph, (X, A, B)).backward


def test_workspace_is_live_during_its_operator() -> None:
    graph = _with(_with(_chain(), B, workspace_bytes=100), GB, workspace_bytes=50)
    variant = variant_of(graph, (X, A, B))
    assert variant.forward_peak_bytes == 112 and Span(-1, 100, 1, 2) in variant.forward
    assert variant.backward_peak_bytes == 16 + 50 - 14
    again = variant_of(graph, (X, A))
    assert Span(-1, 100, 0, 1) in again.backward  # b's, run again first of all


def test_a_generators_state_is_held_where_a_random_node_is_recomputed() -> None:
    graph = _with(_chain(), B, random=True, state_bytes=16)
    assert variant_of(graph, (X, A)).held_bytes == 4 + 16
    assert variant_of(graph, (X, A, B)).held_bytes == 12


def test_a_generators_state_counts_in_the_peaks_where_it_is_taken_and_put_back() -> None:
    plain, graph = _chain(), _with(_chain(), B, random=True, state_bytes=16)
    kept, again = variant_of(graph, (X, A, B)), variant_of(graph, (X, A))
    assert kept == variant_of(plain, (X, A, B))
    # b is the forward's second step, and the first that the backward runs.
    state = len(graph.storages) + B
    assert Span(state, 16, 1, -1) in again.forward
    assert again.forward_peak_bytes == variant_of(plain, (X, A)).forward_peak_bytes + 16
    assert Span(state, 16, -1, 1) in again.backward
    assert Span(-1, 16, 0, 1) in again.backward  # what the generator had meanwhile


def test_a_view_keeps_its_base_and_saving_it_holds_the_base() -> None:
    view = Node("v", "view", "forward", (A,), (A,))
    graph = _chain()
    # b reads a; the view of a is read by c, one step later.
    nodes = (*graph.nodes[:C], view, *graph.nodes[C:])
    shifted = {X: X, A: A, B: B, C: C + 1, T: T + 1, GC: GC + 1, GB: GB + 1, GA: GA + 1}
    nodes = tuple(
        node if node is view else replace(node, inputs=tuple(shifted[i] for i in node.inputs))
        for node in nodes
    )
    nodes = (*nodes[: C + 1], replace(nodes[C + 1], inputs=(B, C)), *nodes[C + 2 :])
    storages = tuple(Storage(s.bytes, shifted[s.maker]) for s in graph.storages)
    graph = JointGraph("k", "K", nodes, storages, (C + 1,), (GA + 1,))
    assert Span(A, 4, 0, 4) in variant_of(graph, (X,)).forward
    assert variant_of(graph, (X, B, C)).held_bytes == 12


def test_a_tuple_keeps_all_its_parts_until_the_last_was_taken() -> None:
    nodes = (
        Node("x", "placeholder", "input", (), (0,)),
        Node("pair", "split", "forward", (0,), (1, 2), can_recompute=True, seconds=1.0),
        Node("p", "getitem", "forward", (1,), (1,), can_save=True, can_recompute=True),
        Node("q", "getitem", "forward", (1,), (2,), can_save=True, can_recompute=True),
        Node("y", "f", "forward", (3,), (3,), can_save=True, can_recompute=True),
        Node("t", "placeholder", "tangent", (), (4,)),
        Node("g", "fb", "backward", (5, 2, 3), (5,)),
    )
    storages = tuple(Storage(s, m) for s, m in ((1, 0), (20, 1), (30, 1), (1, 4), (1, 5), (1, 6)))
    graph = JointGraph("k", "K", nodes, storages, outputs=(4,), gradients=(6,))
    # p is not taken in a forward that does not save it, but the tuple holds it until q is.
    assert Span(1, 20, 0, 2) in variant_of(graph, (0,)).forward
    # With p saved and q not, the operator runs again and p is there twice.
    both = variant_of(graph, (0, 2))
    assert both.recomputed == (1, 3)
    assert [s for s in both.backward if s.storage == 1] == [Span(1, 20, -1, 3), Span(1, 20, 0, 2)]


def test_a_gradient_that_is_the_tangent_stays() -> None:
    graph = replace(_chain(), gradients=(GA, T))
    assert Span(T, 2, -1, -1) in variant_of(graph, (X, A, B)).backward


def test_a_needed_input_must_be_saved() -> None:
    with pytest.raises(ValueError, match="input x is needed"):
        variant_of(_chain(), (A, B))
