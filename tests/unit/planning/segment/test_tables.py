"""The tables of a profile, against values reckoned by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from memfit.ir.joint_graph import JointGraph, Node, Storage
from memfit.ir.profile import CallTime, DeviceFacts, Profile
from memfit.ir.step_graph import Block, Call, Hold, StepGraph
from memfit.planning.segment.tables import (
    ACTIVATION_COLUMNS,
    NODE_COLUMNS,
    activation_rows,
    node_rows,
)

X, W, A, B, BT, C, T, GC, GB, GA = range(10)


def chain_graph(**changes: Any) -> JointGraph:
    """x -> a -> b -> c, b read in backward through a view of it."""
    sizes = (10, 6, 4, 8, 2, 2, 8, 4, 10)  # of x, w, a, b, c, t, gc, gb, ga: bt shows b
    makers = (X, W, A, B, C, T, GC, GB, GA)
    forward = {"can_save": True, "can_recompute": True}
    nodes = (
        Node("x", "placeholder", "input", (), (0,), 10, can_save=True),
        Node("w", "placeholder", "parameter", (), (1,), 6),
        Node("a", "f", "forward", (X, W), (2,), 4, seconds=1.0, **forward),
        Node("b", "g", "forward", (A,), (3,), 8, seconds=2.0, workspace_bytes=100, **forward),
        Node("bt", "t", "forward", (B,), (3,), 8, can_recompute=True),
        Node("c", "h", "forward", (B,), (4,), 2, seconds=3.0, source="net.py:7 h(b)", **forward),
        Node("t", "placeholder", "tangent", (), (5,), 2),
        Node("gc", "hb", "backward", (T, BT), (6,), 8, seconds=4.0),
        Node("gb", "gb", "backward", (GC, A), (7,), 4, seconds=5.0),
        Node("ga", "fb", "backward", (GB, X), (8,), 10, seconds=6.0),
    )
    graph = JointGraph(
        key="chain",
        kind="Chain",
        nodes=nodes,
        storages=tuple(Storage(n, maker) for n, maker in zip(sizes, makers, strict=True)),
        outputs=(C,),
        gradients=(GA,),
        unplanned=(X, A, B),
    )
    return replace(graph, **changes)


def call(index: int, module: str, enter: int, need: int, graph: int) -> Call:
    return Call(
        index=index,
        module=module,
        number=0,
        visits=1,
        kind="Chain" if graph >= 0 else "Linear",
        leaf=graph < 0,
        enter=enter,
        stop=enter + 2,
        exit=enter + 3,
        need=need,
        done=need + 3,
        graph=graph,
        finish=need + 3,
    )


@pytest.fixture
def profile() -> Profile:
    """Two calls of the chain with a layer between them that was not captured."""
    blocks = (
        Block(0, 50, 5, 8, "activations", 1, "aten::mm", (Hold(1, 16, 16),)),
        Block(1, 30, 6, 7, "activations", 1, "aten::add"),
        Block(2, 20, 15, 16, "temporaries"),
        Block(3, 9, 21, 22, "temporaries"),
    )
    calls = (
        call(0, "layers.0", 1, 17, 0),
        call(1, "norm", 4, 14, -1),
        call(2, "layers.1", 7, 11, 0),
    )
    return Profile(
        fingerprint="f",
        workload={},
        device=DeviceFacts("cpu", "test", 10**9, 10**9, "2.13"),
        graph=StepGraph(23, 10, 10, 20, {"parameters": 7}, calls, blocks),
        call_times=(
            CallTime(6.0, 15.0, 6.0, 0.0),
            CallTime(0.5, 0.25, 0.75, 0.0),
            CallTime(6.0, 15.0, 6.0, 0.0),
        ),
        step_s=50.0,
        graphs=(chain_graph(),),
        uncaptured={"norm": "a single layer: nothing inside to plan"},
    )


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    key = "activation_name" if "activation_name" in rows[0] else "node_name"
    assert len({row[key] for row in rows}) == len(rows)
    return {row[key]: row for row in rows}


def test_operators_stand_in_the_order_of_the_step(profile: Profile) -> None:
    rows = node_rows(profile)
    assert [row["rank"] for row in rows] == list(range(len(rows)))
    assert [row["node_name"] for row in rows] == [
        *(f"layers.0/{n}" for n in ("a", "b", "bt", "c")),
        "norm/forward",
        *(f"layers.1/{n}" for n in ("a", "b", "bt", "c", "gc", "gb", "ga")),
        "norm/backward",
        *(f"layers.0/{n}" for n in ("gc", "gb", "ga")),
        "optimizer",
    ]
    assert {row["gtype"] for row in rows[:9]} == {"forward"}
    assert {row["gtype"] for row in rows[9:-1]} == {"backward"}
    assert rows[-1]["gtype"] == "optimizer/other"
    assert all(tuple(row) == NODE_COLUMNS for row in rows)


def test_seconds_of_the_step_are_all_there(profile: Profile) -> None:
    rows = by_name(node_rows(profile))
    assert rows["layers.1/c"]["median_run_time_s"] == 3.0
    assert rows["norm/forward"]["median_run_time_s"] == 0.5
    assert rows["norm/backward"]["median_run_time_s"] == 0.25
    assert rows["optimizer"]["median_run_time_s"] == pytest.approx(50 - 42.75)
    assert sum(r["median_run_time_s"] for r in rows.values()) == pytest.approx(profile.step_s)
    twice = replace(profile, accumulate=2, step_s=90.0)
    assert by_name(node_rows(twice))["optimizer"]["median_run_time_s"] == pytest.approx(4.5)
    # A clock that gives the calls more than the step must not give the rest less than nothing.
    assert by_name(node_rows(replace(profile, step_s=1.0)))["optimizer"]["median_run_time_s"] == 0


def test_what_operators_make_and_where_they_come_from(profile: Profile) -> None:
    rows = by_name(node_rows(profile))
    kinds = {name: row["node_type"] for name, row in rows.items()}
    assert kinds["layers.0/a"] == kinds["layers.0/b"] == kinds["norm/forward"] == "activation"
    assert kinds["layers.0/c"] == kinds["layers.0/gc"] == "other"
    assert kinds["layers.0/ga"] == "gradient" and kinds["optimizer"] == "optimizer_state"
    assert rows["layers.0/c"]["source"] == "net.py:7 h(b)"
    assert rows["norm/forward"]["source"].startswith("a single layer")
    view = Node("wt", "t", "forward", (W,), (1,), 6, can_recompute=True)
    viewed = chain_graph()
    viewed = replace(viewed, nodes=(*viewed.nodes, view))
    shown = by_name(node_rows(replace(profile, graphs=(viewed,))))
    assert shown["layers.0/wt"]["node_type"] == "parameter"


def test_bytes_alive_at_each_operator(profile: Profile) -> None:
    rows = by_name(node_rows(profile))
    active = {name: row["median_active_mem_bytes"] for name, row in rows.items()}
    peak = {name: row["median_peak_mem_bytes"] for name, row in rows.items()}
    # Forward: a, then b, then c are made, and all but c are kept. x and w are not the segment's.
    assert [active[f"layers.0/{n}"] for n in ("a", "b", "bt", "c")] == [4, 12, 12, 14]
    # Backward: a 4, b 8, t 2 are there; gc 8; then b and t are gone and gb 4 comes; then ga 10.
    assert [active[f"layers.0/{n}"] for n in ("gc", "gb", "ga")] == [22, 16, 14]
    assert {n for n in rows if peak[n] != active[n]} == {"layers.0/b", "layers.1/b"}
    assert peak["layers.0/b"] == 112  # and the 100 it works in
    assert active["norm/forward"] == 80  # both blocks at once
    assert active["norm/backward"] == 70  # the one it kept and one made meanwhile
    assert active["optimizer"] == 9


def test_lifetimes_are_ranks_of_the_whole_step(profile: Profile) -> None:
    rows = by_name(activation_rows(profile))
    assert all(tuple(row) == ACTIVATION_COLUMNS for row in rows.values())
    names = [f"layers.{i}/{n}" for i in (0, 1) for n in ("x", "a", "b")]
    assert sorted(rows) == sorted([*names, "norm/mm_0"])
    columns = ACTIVATION_COLUMNS[3:7]
    ranks = {name: tuple(row[c] for c in columns) for name, row in rows.items()}
    assert ranks["layers.0/x"] == (-1, 0, 15, 15)
    assert ranks["layers.0/a"] == (0, 1, 14, 14)
    assert ranks["layers.0/b"] == (1, 3, 13, 13)  # backward reads b through its view
    assert ranks["norm/mm_0"] == (4, 4, 12, 12)
    assert ranks["layers.1/b"] == (6, 8, 9, 9)
    nodes = node_rows(profile)
    for name, (created, *_) in ranks.items():
        if created >= 0 and not name.startswith("norm"):
            assert nodes[created]["node_name"] == name


def test_inactive_time_is_what_runs_strictly_between(profile: Profile) -> None:
    rows = by_name(activation_rows(profile))
    inactive = {name: row["inactive_time_s"] for name, row in rows.items()}
    # After layers.0/c: norm 0.5, the chain's forward 6 and backward 15, norm's backward 0.25.
    assert inactive["layers.0/b"] == pytest.approx(21.75)
    assert inactive["layers.0/a"] == pytest.approx(3.0 + 21.75 + 4.0)
    assert inactive["layers.0/x"] == pytest.approx(2.0 + 3.0 + 21.75 + 4.0 + 5.0)
    assert inactive["norm/mm_0"] == pytest.approx(21.0)
    assert inactive["layers.1/b"] == 0.0


def test_making_a_tensor_again_costs_its_whole_chain(profile: Profile) -> None:
    rows = by_name(activation_rows(profile))
    a, b = rows["layers.0/a"], rows["layers.0/b"]
    assert (a["recomp_time_s"], b["recomp_time_s"]) == (1.0, 3.0)
    assert a["sources"] == b["sources"] == "layers.0/x layers.0/w"
    assert (b["recomp_time_kept_s"], b["sources_kept"]) == (2.0, "layers.0/a")
    assert (a["recomp_memory_bytes"], b["recomp_memory_bytes"]) == (4, 112)
    assert rows["layers.0/x"]["recomp_time_s"] == 0.0  # made elsewhere
    norm = rows["norm/mm_0"]
    assert (norm["recomp_time_s"], norm["recomp_memory_bytes"]) == (0.75, 80)
    nodes = list(chain_graph().nodes)
    nodes[A] = replace(nodes[A], can_recompute=False)  # then b can only be made from a
    rows = by_name(activation_rows(replace(profile, graphs=(chain_graph(nodes=tuple(nodes)),))))
    assert rows["layers.0/b"]["recomp_time_s"] == 2.0
    assert rows["layers.0/b"]["sources"] == "layers.0/a"


def test_a_longer_chain_costs_more_the_deeper_it_is(profile: Profile) -> None:
    depth = 12
    nodes = [Node("x", "placeholder", "input", (), (0,), 1, can_save=True)]
    for i in range(1, depth + 1):
        made = {"can_save": True, "can_recompute": True, "seconds": 1.0}
        nodes.append(Node(f"h{i}", "f", "forward", (i - 1,), (i,), 1, **made))
    nodes.append(Node("t", "placeholder", "tangent", (), (depth + 1,), 1))
    for i in range(depth, -1, -1):
        number = len(nodes)
        nodes.append(Node(f"g{i}", "fb", "backward", (number - 1, i), (number,), 1))
    graph = chain_graph(
        nodes=tuple(nodes),
        storages=tuple(Storage(1, n) for n in range(len(nodes))),
        outputs=(depth,),
        gradients=(len(nodes) - 1,),
        unplanned=tuple(range(depth + 1)),
    )
    rows = by_name(activation_rows(replace(profile, graphs=(graph,))))
    assert [rows[f"layers.0/h{i}"]["recomp_time_s"] for i in range(1, depth + 1)] == list(
        range(1, depth + 1)
    )
    assert {rows[f"layers.0/h{i}"]["recomp_memory_bytes"] for i in range(2, depth + 1)} == {2}


def test_every_number_is_finite_and_the_tables_are_json(profile: Profile) -> None:
    rows = [*node_rows(profile), *activation_rows(profile)]
    numbers = [v for row in rows for v in row.values() if isinstance(v, (int, float))]
    assert all(math.isfinite(n) and n >= -1 for n in numbers)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_a_call_that_backward_never_reaches(profile: Profile) -> None:
    calls = list(profile.graph.calls)
    calls[1] = replace(calls[1], need=-1, done=-1)
    unreached = replace(profile, graph=replace(profile.graph, calls=tuple(calls)))
    assert by_name(node_rows(unreached))["norm/backward"]["median_active_mem_bytes"] == 0
    row = by_name(activation_rows(unreached))["norm/mm_0"]
    assert row["first_bw_use_rank"] == row["last_bw_use_rank"] == -1
    assert row["inactive_time_s"] == 0.0


def test_names_and_ranks_agree_with_the_plan(profile: Profile) -> None:
    from memfit.planning.segment.decisions import variant_plan
    from memfit.planning.segment.passes import variant_of

    graph = profile.graphs[0]
    plan = variant_plan(graph, variant_of(graph, graph.unplanned), unplanned=True)
    rows = by_name(activation_rows(profile))
    assert {f"layers.0/{a.name}" for a in plan.activations} == {
        n for n in rows if n.startswith("layers.0")
    }
    for activation in plan.activations:
        row = rows[f"layers.0/{activation.name}"]
        assert row["creation_rank"] == activation.creation_rank
        assert row["median_mem_size_bytes"] == activation.bytes
