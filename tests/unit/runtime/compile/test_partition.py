"""Cut a joint graph: what is handed over, what runs again and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from memfit.ir.joint_graph import JointGraph
from memfit.runtime.compile import partition
from memfit.runtime.compile.compiled import CompiledSegments
from memfit.runtime.compile.joint import Traced


class Block(nn.Module):
    """Norm, two layers, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(torch.tanh(self.up(self.norm(x)))), 0.1)


class Cuts:
    """Every cut that is made while it is at work."""

    def __init__(self) -> None:
        self.traced: list[Traced] = []
        self.graphs: list[JointGraph] = []
        self.pairs: list[partition.Pair] = []


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuts]:
    made, split = Cuts(), partition.split

    def noted(traced: Traced, graph: JointGraph, saved: Sequence[str]) -> partition.Pair:
        made.traced.append(traced)
        made.graphs.append(graph)
        made.pairs.append(split(traced, graph, saved))
        return made.pairs[-1]

    monkeypatch.setattr(partition, "split", noted)
    yield made


def capture(module: nn.Module, x: torch.Tensor) -> tuple[CompiledSegments, JointGraph]:
    segments = CompiledSegments("graph")
    segments(module.forward, (x,), {})
    return segments, segments.graphs[str(segments.last_key)]


def plan(segments: CompiledSegments, graph: JointGraph, saved: Sequence[int], *call: Any) -> Any:
    module, x = call
    names = [graph.nodes[i].name for i in saved]
    return segments(module.forward, (x,), {}, key=graph.key, saved=names)


def operators(half: fx.GraphModule) -> list[str]:
    return [n.name for n in half.graph.nodes if n.op == "call_function"]


def inputs(graph: JointGraph) -> list[int]:
    return [i for i, n in enumerate(graph.nodes) if n.role == "input"]


def test_unplanned_the_backward_runs_in_the_planned_order(cuts: Cuts) -> None:
    _, graph = capture(Block(), torch.randn(4, 8, requires_grad=True))
    (pair,) = cuts.pairs
    order = graph.backward_order(frozenset(graph.unplanned))
    assert operators(pair.backward) == [graph.nodes[i].name for i in order]
    assert pair.saved == tuple(graph.nodes[i].name for i in graph.unplanned)
    assert pair.results[: pair.num_outputs] == (graph.nodes[graph.outputs[0]].name,)


def test_a_recomputed_random_operator_hands_over_its_state(cuts: Cuts) -> None:
    module, x = Block(), torch.randn(4, 8, requires_grad=True)
    segments, graph = capture(module, x)
    plan(segments, graph, inputs(graph), module, x)
    pair = cuts.pairs[-1]
    assert pair.saved == tuple(graph.nodes[i].name for i in inputs(graph))
    assert pair.results.count("") == 1, "one state for one dropout"
    replayed = [n for n in operators(pair.backward) if "rng" in n]
    assert len(replayed) == 1
    order = [graph.nodes[i] for i in graph.backward_order(frozenset(inputs(graph)))]
    kept = [n.name for n in order if not n.random]
    assert [n for n in operators(pair.backward) if n not in replayed] == kept


def test_a_random_operator_that_is_not_needed_again_does_not_run_again(cuts: Cuts) -> None:
    """With its mask kept, dropout draws nothing in the backward though it could."""
    module, x = Block(), torch.randn(4, 8, requires_grad=True)
    segments, graph = capture(module, x)
    mask = [i for i in graph.unplanned if graph.nodes[i].shape.startswith("bool")]
    assert len(mask) == 1
    output = plan(segments, graph, [*inputs(graph), *mask], module, x)
    assert not any(
        "dropout" in n and "backward" not in n for n in operators(cuts.pairs[-1].backward)
    )
    state = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_what_the_backward_does_not_need_is_not_handed_over(cuts: Cuts) -> None:
    module, x = Block(), torch.randn(4, 8, requires_grad=True)
    segments, graph = capture(module, x)
    (output,) = graph.outputs
    assert output not in graph.unplanned
    plan(segments, graph, [*graph.unplanned, output], module, x)
    assert cuts.pairs[-1].saved == cuts.pairs[0].saved


def test_a_missing_input_is_an_error(cuts: Cuts) -> None:
    _, graph = capture(Block(), torch.randn(4, 8, requires_grad=True))
    with pytest.raises(ValueError, match="is needed and not saved"):
        partition.split(cuts.traced[0], graph, ())


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.layer(x))).sin()


def test_a_recomputed_batch_norm_leaves_its_statistics_alone(cuts: Cuts) -> None:
    module, x = Norm(), torch.randn(4, 8, requires_grad=True)
    segments, graph = capture(module, x)
    output = plan(segments, graph, inputs(graph), module, x)
    targets = {str(n.target) for n in cuts.pairs[-1].backward.graph.nodes}
    assert "aten._native_batch_norm_legit.no_stats" in targets
    assert not any("functional" in t for t in targets)
    seen = {n: b.clone() for n, b in module.named_buffers()}
    output.sum().backward()
    torch.testing.assert_close(dict(module.named_buffers()), seen, rtol=0, atol=0)
    assert module.norm.num_batches_tracked == 2, "one for each forward"


class Counted(nn.Module):
    """Adds a buffer that it changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return (x * self.count).exp()


def test_what_reads_a_changed_buffer_must_be_kept(cuts: Cuts) -> None:
    module, x = Counted(), torch.randn(4, 8, requires_grad=True)
    _, graph = capture(module, x)
    (count,) = (i for i, n in enumerate(graph.nodes) if n.op == "aten.add.Tensor")
    assert count in graph.unplanned and not graph.nodes[count].can_recompute
    with pytest.raises(AssertionError, match="must not run again"):
        partition.split(cuts.traced[0], graph, [graph.nodes[i].name for i in inputs(graph)])
