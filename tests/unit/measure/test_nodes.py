"""Costs of single operators: seconds, workspace, and what fusing makes of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from memfit.measure.allocations import Event
from memfit.measure.fused import FUSION_FACTOR
from memfit.measure.nodes import _bytes_per_second, _Timer, _workspace, measure_nodes

aten = torch.ops.aten
Half = Callable[..., fx.GraphModule]


def _measured(half: Half, fused: bool) -> tuple[dict[str, float], dict[str, int]]:
    forward = half([("mm", aten.mm.default, (0, 0)), ("sin", aten.sin.default, (1,))], ["x"])
    backward = half([("mul", aten.mul.Tensor, (0, 1))], ["x", "y"])
    costs = measure_nodes(forward, backward, [torch.randn(64, 64)], num_outputs=0, fused=fused)
    return (
        {name: cost.seconds for name, cost in costs.items()},
        {name: cost.workspace_bytes for name, cost in costs.items()},
    )


def test_every_operator_of_both_graphs_is_timed(half: Half) -> None:
    seconds, workspace = _measured(half, fused=False)
    assert seconds.keys() == {"mm", "sin", "mul"}
    assert all(s > 0 for s in seconds.values())
    assert workspace == {"mm": 0, "sin": 0, "mul": 0}


def test_fused_elementwise_operators_cost_a_share_of_the_bytes_they_move(half: Half) -> None:
    seconds, _ = _measured(half, fused=True)
    size = 64 * 64 * 4
    # Bytes read and written: 3 against 2.
    assert seconds["mul"] * 2 == pytest.approx(seconds["sin"] * 3)
    assert 0 < seconds["sin"] < FUSION_FACTOR * 2 * size / 1e8
    assert seconds["mm"] > 0


def test_fused_elementwise_operators_are_not_timed(
    half: Half, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[int] = []
    median = _Timer._median

    def counted(timer: _Timer, work: Callable[[], object]) -> float:
        timed.append(1)
        return median(timer, work)

    _bytes_per_second(torch.device("cpu"))
    monkeypatch.setattr(_Timer, "_median", counted)
    _measured(half, fused=True)
    assert len(timed) == 1  # the matrix product


def test_workspace_is_what_an_operator_held_beyond_its_result() -> None:
    events = [
        Event("alloc", 9, 1000, ""),
        Event("mark", 0, 0, "begin a"),
        Event("alloc", 1, 100, ""),
        Event("alloc", 2, 30, ""),
        Event("free", 2, 30, ""),
        Event("mark", 0, 0, "end"),
        Event("free", 9, 1000, ""),
        Event("mark", 0, 0, "begin b"),
        Event("alloc", 3, 50, ""),
        Event("mark", 0, 0, "end"),
    ]
    assert _workspace(events) == {"a": 30, "b": 0}


def test_operators_that_write_get_copies_and_inputs_stay_as_they_are(half: Half) -> None:
    forward = half([("add_", aten.add_.Tensor, (0, 0))], ["x"])
    backward = half([("mul", aten.mul.Tensor, (0, 0))], ["x", "y"])
    x = torch.ones(64, 64)
    measure_nodes(forward, backward, [x], num_outputs=0, fused=False)
    assert torch.equal(x, torch.ones(64, 64))
