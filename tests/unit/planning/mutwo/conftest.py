"""A step of captured calls, small enough to reckon by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memfit.ir.joint_graph import JointGraph, Node, Storage
from memfit.ir.profile import CallTime, CopyRates, DeviceFacts, Profile
from memfit.ir.step_graph import Block, Call, Hold, StepGraph

MIB = 2**20
X, W, A, B, C, T, GC, GB, GA = range(9)
SIZES = {X: MIB, A: 4 * MIB, B: 8 * MIB, C: MIB}


@pytest.fixture(scope="session")
def graph() -> JointGraph:
    """x -> a -> b -> c, of which the backward reads b, a and x, in this order."""
    forward = {"can_save": True, "can_recompute": True}
    nodes = (
        Node("x", "placeholder", "input", (), (X,), SIZES[X], can_save=True),
        Node("w", "placeholder", "parameter", (), (W,), 8),
        Node("a", "f", "forward", (X, W), (A,), SIZES[A], seconds=1.0, **forward),
        Node("b", "g", "forward", (A,), (B,), SIZES[B], seconds=2.0, **forward),
        Node("c", "h", "forward", (B,), (C,), SIZES[C], seconds=3.0, **forward),
        Node("t", "placeholder", "tangent", (), (T,), SIZES[C]),
        Node("gc", "hb", "backward", (T, B), (GC,), 8, seconds=3.0),
        Node("gb", "gb", "backward", (GC, A), (GB,), 8, seconds=4.0),
        Node("ga", "fb", "backward", (GB, X), (GA,), 8, seconds=5.0),
    )
    storages = tuple(Storage(node.bytes, i) for i, node in enumerate(nodes))
    return JointGraph("chain", "Chain", nodes, storages, (C,), (GA,), unplanned=(X, A, B))


@pytest.fixture(scope="session")
def captured(graph: JointGraph) -> Callable[..., Profile]:
    """`captured(n)`: n calls of the graph, each given what the one before returned."""

    def build(count: int, copy: CopyRates | None = None, **changes: Any) -> Profile:
        needs = [10 * count + 5 + 10 * (count - 1 - i) for i in range(count)]
        # The first input is there before any call; then a, b and the output of each call.
        blocks = [Block(0, SIZES[X], 0, 5, "activations", -1, "", (_hold(0, needs[0]),))]
        calls = []
        for i, need in enumerate(needs):
            enter, given = 1 + 10 * i, len(blocks) - 1 if i else 0
            for size in (SIZES[A], SIZES[B]):
                number = len(blocks)
                hold = (_hold(i, need),)
                blocks.append(Block(number, size, enter + 1, enter + 2, "activations", i, "", hold))
            output = len(blocks)
            hold = (_hold(i + 1, needs[i + 1]),) if i + 1 < count else ()
            blocks.append(
                Block(output, SIZES[C], enter + 3, enter + 12, "activations", i, "", hold)
            )
            calls.append(
                Call(
                    index=i,
                    module=f"layers.{i}",
                    number=0,
                    visits=1,
                    kind="Chain",
                    leaf=False,
                    enter=enter,
                    stop=enter + 3,
                    exit=enter + 5,
                    need=need,
                    done=need + 8,
                    args=(given,),
                    graph=0,
                    finish=need + 8,
                    held={"x": given, "c": output},
                )
            )
        end = 20 * count + 10
        step = StepGraph(
            end, 10 * count, 10 * count + 1, end - 2, {"parameters": 7}, tuple(calls), tuple(blocks)
        )
        return Profile(
            fingerprint="captured",
            workload={},
            device=DeviceFacts("cpu", "test", 10**12, 10**12, "2.13"),
            graph=step,
            call_times=(CallTime(6.0, 12.0, 6.0, 0.0),) * count,
            step_s=18.0 * count,
            graphs=(graph,),
            copy=copy,
            **changes,
        )

    return build


def _hold(call: int, need: int) -> Hold:
    return Hold(call, need + 8, need + 8)
