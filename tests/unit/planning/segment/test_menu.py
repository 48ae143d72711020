"""Menus against brute force and a plain interpreter on random segments, and by hand."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.ir.joint_graph import JointGraph, Node, Span, Storage, Variant
from memfit.planning.segment.menu import MAX_VARIANTS, frontier, menu_of
from memfit.planning.segment.mincut import Choices
from memfit.planning.segment.passes import total_bytes, variant_of

Draw = Callable[[st.SearchStrategy[Any]], Any]
SIZES = st.integers(0, 9)

# -- random segments ------------------------------------------------------------------------------


@dataclass
class _Writer:
    """Writes a segment node by node."""

    nodes: list[Node] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)

    def add(
        self,
        role: str,
        inputs: Iterable[int] = (),
        sizes: Sequence[int] = (),
        shares: tuple[int, ...] = (),
        **facts: Any,
    ) -> int:
        """A node that makes storages of these sizes and shares others; its number."""
        number = len(self.nodes)
        made = tuple(range(len(self.storages), len(self.storages) + len(sizes)))
        self.storages.extend(Storage(size, number) for size in sizes)
        own = sum(sizes) + sum(self.storages[s].bytes for s in shares)
        op = facts.pop("op", role)
        node = Node(f"n{number}", op, role, tuple(inputs), (*shares, *made), own, **facts)
        self.nodes.append(node)
        return number

    def graph(self, outputs: Iterable[int], gradients: Iterable[int]) -> JointGraph:
        nodes, storages = tuple(self.nodes), tuple(self.storages)
        return JointGraph("key", "Kind", nodes, storages, tuple(outputs), tuple(gradients))


def _some(draw: Draw, values: Sequence[int], most: int = 3) -> list[int]:
    return draw(st.lists(st.sampled_from(values), min_size=1, max_size=most))


def _add_operator(draw: Draw, writer: _Writer, values: list[int], *, aliases: bool) -> None:
    """One forward operator: plain, with several outputs, a view, a symbolic value or an alias."""
    kinds = ["plain", "plain", "plain", "pair", "view", "symbol"] + ["alias"] * aliases
    kind = draw(st.sampled_from(kinds))
    inputs = _some(draw, values)
    again = draw(st.sampled_from((True, True, True, False)))
    chance = draw(st.booleans())
    facts: dict[str, Any] = {
        "can_recompute": again,
        "seconds": float(draw(st.integers(0, 6))),
        "random": chance,
        "state_bytes": 1 if chance else 0,
        "workspace_bytes": draw(SIZES),
    }
    if kind == "plain":
        values.append(writer.add("forward", inputs, (draw(SIZES),), can_save=True, **facts))
    elif kind == "pair":
        pair = writer.add("forward", inputs, (draw(SIZES), draw(SIZES)), **facts)
        for storage in writer.nodes[pair].storages:
            getitem = {"op": "getitem", "can_save": True, "can_recompute": True}
            values.append(writer.add("forward", (pair,), (), (storage,), **getitem))
    elif kind == "symbol":
        values.append(writer.add("forward", inputs, can_recompute=True))
    else:
        shares = writer.nodes[inputs[0]].storages
        alias = {**facts, "can_save": True} if kind == "alias" else {"can_recompute": True}
        values.append(writer.add("forward", inputs[:1], (), shares, **alias))


@st.composite
def segments(draw: Draw, operators: int = 7, aliases: bool = False) -> JointGraph:
    """Any valid segment; with `aliases` several savable nodes may share a storage."""
    writer = _Writer()
    values = [writer.add("parameter", (), (draw(SIZES),))]
    inputs = [writer.add("input", (), (draw(SIZES),)) for _ in range(draw(st.integers(1, 2)))]
    values += inputs
    for _ in range(draw(st.integers(1, operators))):
        _add_operator(draw, writer, values, aliases=aliases)
    computed = [v for v in values if writer.nodes[v].role == "forward"]
    outputs = _some(draw, computed, 2)
    behind = [writer.add("tangent", (), (draw(SIZES),)) for _ in outputs]
    for _ in range(draw(st.integers(1, operators))):
        reads = _some(draw, behind, 2) + _some(draw, values, 2)
        if draw(st.booleans()):
            work = draw(SIZES)
            made = writer.add("backward", reads, (draw(SIZES),), workspace_bytes=work)
        else:
            made = writer.add("backward", reads, (), writer.nodes[reads[-1]].storages)
        behind.append(made)
    gradients = dict.fromkeys(_some(draw, behind) + _some(draw, values, 1))
    return writer.graph(dict.fromkeys(outputs), gradients)


# -- plain references -----------------------------------------------------------------------------


def _interpret(
    graph: JointGraph, order: Sequence[int], start: dict[int, list[list[int]]], stay: Iterable[int]
) -> list[int]:
    """Live bytes at each step: of all that a value holds which is read now or later, or stays.

    Memory is a list [storage, bytes], told apart by identity; values not in `start` hold none.
    """
    held = dict(start)
    curve = []
    for step, number in enumerate(order):
        node = graph.nodes[number]
        held[number] = [
            memory for i in node.inputs for memory in held.get(i, []) if memory[0] in node.storages
        ] + [
            [s, graph.storages[s].bytes] for s in node.storages if graph.storages[s].maker == number
        ]
        still_read = {number, *stay} | {i for n in order[step:] for i in graph.nodes[n].inputs}
        alive = {id(m): m[1] for value in held if value in still_read for m in held[value]}
        curve.append(sum(alive.values()) + node.workspace_bytes)
    return curve


def _interpret_backward(graph: JointGraph, saved: frozenset[int]) -> tuple[int, list[int]]:
    """Bytes counted at the start of the backward, and at each of its steps."""
    memory = {s: [s, storage.bytes] for s, storage in enumerate(graph.storages)}
    for s, storage in enumerate(graph.storages):
        if s in graph.output_storages or graph.nodes[storage.maker].role == "input":
            memory[s][1] = 0
        elif graph.nodes[storage.maker].role == "parameter":
            memory[s][1] = 0
    first = [n for n, node in enumerate(graph.nodes) if n in saved or node.role == "tangent"]
    start = {n: [memory[s] for s in graph.nodes[n].storages] for n in first}
    there = {id(m): m[1] for held in start.values() for m in held}
    order, states = graph.backward_order(saved), _states(graph, saved)
    curve = _interpret(graph, order, start, graph.gradients)
    for step, node in enumerate(order):  # states not put back yet, and what that puts aside
        curve[step] += sum(states.get(n, 0) for n in order[step:]) + states.get(node, 0)
    return sum(there.values()) + sum(states.values()), curve


def _states(graph: JointGraph, saved: frozenset[int]) -> dict[int, int]:
    """Bytes of the generator states of random nodes that are run again."""
    return {n: graph.nodes[n].state_bytes for n in graph.recomputed(saved)}


def _curve(spans: Sequence[Span], steps: int) -> list[int]:
    return [
        sum(s.bytes for s in spans if s.birth <= step and (s.death < 0 or step < s.death))
        for step in range(steps)
    ]


def _runs_again(graph: JointGraph, saved: Iterable[int]) -> set[int] | None:
    """What the backward must run again, None when it cannot."""
    again: set[int] = set()
    known = set(saved)

    def have(number: int) -> bool:
        node = graph.nodes[number]
        if number in known or number in again or node.role == "parameter":
            return True
        again.add(number)
        return node.role == "forward" and node.can_recompute and all(map(have, node.inputs))

    return again if all(map(have, graph.needed)) else None


def _all_points(graph: JointGraph) -> list[tuple[int, float]]:
    """Bytes and seconds of every saved set that is possible."""
    savable = [n for n in _savable(graph) if n in _ancestors(graph)]
    points = []
    for count in range(len(savable) + 1):
        for saved in combinations(savable, count):
            again = _runs_again(graph, saved)
            if again is None:
                continue
            storages = {s for n in saved for s in graph.nodes[n].storages}
            makers = {s: graph.nodes[graph.storages[s].maker].role for s in storages}
            held = sum(graph.storages[s].bytes for s in storages if makers[s] != "parameter")
            state = sum(graph.nodes[n].state_bytes for n in again)
            points.append((held + state, sum(graph.again_seconds[n] for n in again)))
    return points


def _savable(graph: JointGraph) -> list[int]:
    return [n for n, node in enumerate(graph.nodes) if node.can_save or node.role == "input"]


def _ancestors(graph: JointGraph) -> set[int]:
    found = set(graph.needed)
    for number in reversed(range(len(graph.nodes))):
        if number in found:
            found.update(graph.nodes[number].inputs)
    return found


# -- properties -----------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(data=st.data(), graph=segments(aliases=True))
def test_passes_are_the_interpreters(data: st.DataObject, graph: JointGraph) -> None:
    chosen = data.draw(st.sets(st.sampled_from(_savable(graph))))
    saved = frozenset(chosen | {n for n, v in enumerate(graph.nodes) if v.role == "input"})
    variant = variant_of(graph, saved)
    order = graph.forward_order(saved)
    forward = _interpret(graph, order, {}, saved | set(graph.outputs))
    states = _states(graph, saved)
    for step in range(len(order)):  # generator states taken so far
        forward[step] += sum(states.get(n, 0) for n in order[: step + 1])
    assert _curve(variant.forward, len(order)) == forward
    assert variant.forward_peak_bytes == max(forward, default=0)
    start, backward = _interpret_backward(graph, saved)
    assert _curve(variant.backward, len(graph.backward_order(saved))) == backward
    assert variant.backward_peak_bytes == max(0, max(backward) - start)


@settings(max_examples=150, deadline=None)
@given(graph=segments(aliases=True), least=st.integers(0, 5))
def test_every_variant_of_a_menu_can_be_run(graph: JointGraph, least: int) -> None:
    menu = menu_of(graph, min_tensor_bytes=least)
    assert menu and len(menu) <= MAX_VARIANTS
    for variant in menu:
        assert _runs_again(graph, variant.saved) == set(variant.recomputed)
        assert set(variant.saved) <= set(_savable(graph))
        assert variant == variant_of(graph, variant.saved)
    assert menu == menu_of(graph, min_tensor_bytes=least)
    assert all(a.seconds <= b.seconds for a, b in pairwise(menu))
    costs = [_costs(graph, v) for v in menu]
    for cost in costs:
        beaten_by = [c for c in costs if all(a <= b for a, b in zip(c, cost, strict=True))]
        assert beaten_by == [cost]


def _costs(graph: JointGraph, v: Variant) -> tuple[float, ...]:
    total = total_bytes(graph, v)
    return v.seconds, total, v.forward_peak_bytes, total + v.backward_peak_bytes


@settings(max_examples=150, deadline=None)
@given(graph=segments())
def test_points_have_the_least_seconds_for_their_bytes(graph: JointGraph) -> None:
    """For each point's bytes, no saved set that holds at most as many takes fewer seconds."""
    every = _all_points(graph)
    points = frontier(Choices(graph))
    for point in points:
        variant = variant_of(graph, point.saved)
        assert (total_bytes(graph, variant), variant.seconds) == (point.bytes, point.seconds)
        assert point.seconds == min(seconds for held, seconds in every if held <= point.bytes)
    least_seconds = min(seconds for _, seconds in every)
    keep = min(held for held, seconds in every if seconds == least_seconds)
    assert (points[0].bytes, points[0].seconds) == (keep, least_seconds)
    assert points[-1].bytes == min(held for held, _ in every)


@settings(max_examples=100, deadline=None)
@given(graph=segments())
def test_no_hole_is_left_that_a_saved_set_could_fill(graph: JointGraph) -> None:
    """From a tenth of the first's bytes below a point on, its neighbour is the best there is."""
    points = frontier(Choices(graph))
    every = _all_points(graph)
    for left, right in pairwise(points):
        most = left.bytes - 0.1 * points[0].bytes
        between = [seconds for held, seconds in every if right.bytes < held <= most]
        assert all(seconds >= right.seconds for seconds in between)


@settings(max_examples=60, deadline=None)
@given(graph=segments())
def test_the_menu_starts_with_the_first_point_and_goes_down_to_the_least_bytes(
    graph: JointGraph,
) -> None:
    points = frontier(Choices(graph))
    menu = menu_of(graph)
    first = menu[0]
    assert (total_bytes(graph, first), first.seconds) == (points[0].bytes, points[0].seconds)
    assert min(total_bytes(graph, v) for v in menu) == points[-1].bytes


# -- by hand --------------------------------------------------------------------------------------


def _chain(sizes: Sequence[int], seconds: Sequence[float], **facts: Any) -> JointGraph:
    """An input of 10 bytes and operators in a row; each gradient reads what its operator read."""
    writer = _Writer()
    values = [writer.add("input", (), (10,))]
    for size, cost in zip(sizes, seconds, strict=True):
        more = {"can_save": True, "can_recompute": True, "seconds": cost, **facts}
        values.append(writer.add("forward", values[-1:], (size,), **more))
    gradient = writer.add("tangent", (), (sizes[-1],))
    for value in reversed(values[:-1]):
        gradient = writer.add("backward", (gradient, value), (writer.nodes[value].bytes,))
    return writer.graph(values[-1:], (gradient,))


def _table(graph: JointGraph, menu: Sequence[Variant]) -> list[tuple[int, float]]:
    return [(total_bytes(graph, v), v.seconds) for v in menu]


def test_the_menu_of_a_chain() -> None:
    graph = _chain((4, 8, 2), (1.0, 2.0, 3.0))
    # All four points lie on one line: the two in the middle are the 0/1 programs'.
    assert _table(graph, menu_of(graph)) == [(22, 0.0), (18, 1.0), (14, 2.0), (10, 3.0)]
    assert [v.saved for v in menu_of(graph)] == [(0, 1, 2), (0, 2), (0, 1), (0,)]


def test_a_chain_of_recompute_is_seen_as_one() -> None:
    # a alone is dear to save; b is free to run again from a, and a from x.
    graph = _chain((100, 100, 2), (1.0, 0.0, 9.0))
    assert _table(graph, menu_of(graph)) == [(110, 0.0), (10, 1.0)]


def test_what_cannot_be_recomputed_is_saved() -> None:
    graph = _chain((4, 8, 2), (1.0, 2.0, 3.0))
    nodes = list(graph.nodes)
    nodes[1] = replace(nodes[1], can_recompute=False)
    graph = replace(graph, nodes=tuple(nodes))
    assert _table(graph, menu_of(graph)) == [(22, 0.0), (14, 2.0)]


def test_small_tensors_are_kept() -> None:
    graph = _chain((4, 800, 2), (1.0, 2.0, 3.0))
    menu = menu_of(graph, min_tensor_bytes=5)
    assert [v.saved for v in menu] == [(0, 1, 2), (0, 1), (0,)]  # the last recomputes all
    assert _table(graph, menu) == [(814, 0.0), (14, 2.0), (10, 3.0)]


def test_the_variant_that_recomputes_all_is_there() -> None:
    graph = _chain((4, 8, 2), (0.0, 0.0, 0.0))
    assert [v.saved for v in menu_of(graph)] == [(0,)]
    assert menu_of(graph)[0].recomputed == (1, 2)


def test_an_extra_variant_stands_for_the_computed_one() -> None:
    graph = _chain((4, 8, 2), (1.0, 2.0, 3.0))
    seen = replace(variant_of(graph, (0, 1)), seconds=1.9, measured=True)
    keep = replace(variant_of(graph, (0, 1, 2)), seconds=0.1, measured=True)
    menu = menu_of(graph, extra=(seen, keep))
    assert [v.seconds for v in menu] == [0.1, 1.0, 1.9, 3.0]
    assert menu[0] == keep and menu[2] == seen


def test_an_extra_variant_that_is_beaten_is_dropped() -> None:
    graph = _chain((4, 8, 2), (1.0, 2.0, 3.0))
    wasteful = variant_of(graph, (0, 1, 2, 3))
    assert wasteful not in menu_of(graph, extra=(wasteful,))


def test_inputs_in_one_storage_are_paid_for_once() -> None:
    writer = _Writer()
    whole = writer.add("input", (), (12,))
    half = writer.add("input", (), (), (0,))
    facts = {"can_save": True, "can_recompute": True, "seconds": 1.0}
    made = [writer.add("forward", (whole,), (5,), **facts)]
    made.append(writer.add("forward", (half,), (8,), **facts))
    end = writer.add("forward", made, (1,), **facts)
    tangent = writer.add("tangent", (), (1,))
    gradient = writer.add("backward", (tangent, *made), (1,))
    graph = writer.graph((end,), (gradient,))
    assert _table(graph, menu_of(graph)) == [(13, 0.0), (12, 2.0)]


def test_savable_nodes_in_one_storage_are_held_once() -> None:
    writer = _Writer()
    facts = {"can_save": True, "can_recompute": True, "seconds": 1.0}
    values = [writer.add("forward", (writer.add("input", (), (10,)),), (100,), **facts)]
    for _ in range(5):
        values.append(writer.add("forward", values[-1:], (), (1,), **facts))
    end = writer.add("forward", values[-1:], (1,), **facts)
    tangent = writer.add("tangent", (), (1,))
    gradient = writer.add("backward", (tangent, *values), (1,))
    graph = writer.graph((end,), (gradient,))
    assert _table(graph, menu_of(graph)) == [(100, 0.0), (10, 6.0)]


def test_a_needed_value_that_cannot_be_had_is_an_error() -> None:
    graph = _chain((4, 8, 2), (1.0, 2.0, 3.0), can_save=False, can_recompute=False)
    with pytest.raises(ValueError, match="n1 is needed, and can neither be saved nor recomputed"):
        menu_of(graph)


def test_large_bytes_and_short_seconds_do_not_overflow_or_vanish() -> None:
    gib = 2**30
    graph = _chain((70 * gib, 512, 90 * gib, 3), (0.2, 1e-7, 3e-7, 1.0))
    assert _table(graph, menu_of(graph)) == [
        (160 * gib + 522, 0.0),
        (70 * gib + 522, 3e-7),
        (70 * gib + 10, pytest.approx(4e-7, abs=1e-12)),
        (522, pytest.approx(0.2 + 3e-7, abs=1e-12)),
        (10, pytest.approx(0.2 + 4e-7, abs=1e-12)),
    ]


def _block(layers: int, seed: int = 0) -> JointGraph:
    """A long chain with residuals and dropout, every backward reading what its operator read."""
    rng = random.Random(seed)
    writer = _Writer()
    values = [writer.add("input", (), (2**20,))]
    skip = values[0]
    for layer in range(layers):
        inputs = [values[-1], skip] if layer % 4 == 3 else [values[-1]]
        chance = layer % 10 == 5
        size, cost = rng.randint(1, 4) * 2**18, rng.random() * rng.choice((1e-5, 1e-4, 1e-3))
        facts = {"seconds": cost, "random": chance, "state_bytes": 16 * chance}
        again = rng.random() < 0.98
        new = writer.add("forward", inputs, (size,), can_save=True, can_recompute=again, **facts)
        skip = new if layer % 4 == 3 else skip
        values.append(new)
    gradient = writer.add("tangent", (), (2**20,))
    for value in reversed(values[1:]):
        reads = (gradient, *(i for i in writer.nodes[value].inputs if rng.random() < 0.8))
        gradient = writer.add("backward", reads, (writer.nodes[value].bytes,))
    return writer.graph(values[-1:], (gradient,))


@pytest.mark.parametrize(("layers", "limit_s"), [(100, 1.0), (10_000, 10.0)])
def test_a_menu_is_made_in_time(layers: int, limit_s: float) -> None:
    graph = _block(layers)
    begin = time.process_time()  # other processes may be busy
    menu = menu_of(graph)
    assert time.process_time() - begin < limit_s
    assert len(menu) == MAX_VARIANTS
    held = sorted(total_bytes(graph, v) for v in menu)
    # No two neighbours are further apart than a few even parts.
    assert max(b - a for a, b in pairwise(held)) < 3 * (held[-1] - held[0]) / MAX_VARIANTS
