"""Graphs to reckon with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx


@pytest.fixture
def half() -> Callable[..., fx.GraphModule]:
    """Makes a graph of operators on placeholders; numbers point to what came before."""
    return _half


def _half(
    operators: Sequence[tuple[str, object, tuple[int, ...]]],
    names: Sequence[str],
    outputs: Sequence[int] = (-1, 0),
) -> fx.GraphModule:
    graph = fx.Graph()
    made = [graph.placeholder(name) for name in names]
    for node in made:
        node.meta["val"] = torch.empty(64, 64, device="meta")
    for name, target, sources in operators:
        node = graph.create_node(
            "call_function", target, tuple(made[i] for i in sources), name=name
        )
        node.meta["val"] = torch.empty(64, 64, device="meta")
        made.append(node)
    graph.output(tuple(made[i] for i in outputs))
    return fx.GraphModule(torch.nn.Module(), graph)
