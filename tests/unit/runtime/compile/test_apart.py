"""Fused code makes again by itself what others read, too."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from memfit.ir.joint_graph import JointGraph
from memfit.runtime.compile import backend
from memfit.runtime.compile.apart import make_apart
from memfit.runtime.compile.compiled import CompiledSegments

aten = torch.ops.aten


class Norms(nn.Module):
    """Convolutions between batch norms with ReLUs, as in a residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.norm(self.first(x)))) + x)


def _saved(graph: JointGraph, node: int) -> str:
    """The node, or what it is a view of."""
    while not graph.nodes[node].can_save:
        node = graph.nodes[node].inputs[0]
    return graph.nodes[node].name


def _backward(reader: object, other: object = aten.mm.default) -> fx.GraphModule:
    """`active` is made again from `source`; a reader of `active` reads `source` as well."""
    graph = fx.Graph()
    source, gradient = graph.placeholder("source"), graph.placeholder("gradient")
    inner = graph.create_node("call_function", aten.sin.default, (source,), name="inner")
    active = graph.create_node("call_function", aten.relu.default, (inner,), name="active")
    product = graph.create_node("call_function", other, (active, gradient), name="product")
    masked = graph.create_node("call_function", reader, (product, active), name="masked")
    result = graph.create_node("call_function", aten.mul.Tensor, (masked, source), name="result")
    graph.output((result,))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(64, 64, device="meta")
    return fx.GraphModule(nn.Module(), graph)


def test_fused_readers_get_the_operators_that_make_it() -> None:
    half = _backward(aten.mul.Tensor)
    inputs = torch.randn(64, 64), torch.randn(64, 64)
    expected = half(*inputs)
    assert make_apart(half, {"inner", "active"}) == 2
    half.graph.lint()
    half.recompile()
    nodes = {n.name: n for n in half.graph.nodes}
    assert nodes["active"].users.keys() == {nodes["product"]}
    assert [n.target for n in nodes["masked"].args] == [aten.mm.default, aten.relu.default]
    assert torch.equal(half(*inputs)[0], expected[0])


@pytest.mark.parametrize(
    ("reader", "other", "again"),
    [
        (aten.mm.default, aten.mm.default, {"inner", "active"}),  # no fused reader
        (aten.mul.Tensor, aten.mul.Tensor, {"inner", "active"}),  # none but fused ones
        (aten.mul.Tensor, aten.mm.default, set()),  # nothing is made again
        (aten.expand_as.default, aten.mm.default, {"inner", "active"}),  # a view: of what, for whom
    ],
)
def test_others_are_left_as_they_are(reader: object, other: object, again: set[str]) -> None:
    assert make_apart(_backward(reader, other), again) == 0


def test_random_numbers_are_read_rather_than_made_in_every_pass() -> None:
    half = _backward(aten.mul.Tensor)
    inner = next(n for n in half.graph.nodes if n.name == "inner")
    inner.target = torch.ops.prims.inductor_random.default
    assert make_apart(half, {"inner", "active"}) == 0


def test_what_would_take_more_to_read_is_not_made_apart() -> None:
    half = _backward(aten.mul.Tensor)
    nodes = {n.name: n for n in half.graph.nodes}
    nodes["result"].args = (nodes["masked"], nodes["masked"])  # nobody else reads the source
    half.recompile()
    assert make_apart(half, {"inner", "active"}) == 0


def test_blocks_with_batch_norms_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[int] = []

    def counted(*args: object) -> int:
        added.append(make_apart(*args))  # type: ignore[arg-type]
        return added[-1]

    monkeypatch.setattr(backend, "make_apart", counted)
    torch.manual_seed(0)
    model, x = Norms(), torch.randn(4, 8, 6, 6, requires_grad=True)
    wanted = [x, *model.parameters()]

    def gradients(segments: CompiledSegments, **how: object) -> tuple[torch.Tensor, ...]:
        loss = segments(model.forward, (x,), {}, **how).square().sum()  # type: ignore[arg-type]
        return torch.autograd.grad(loss, wanted)

    segments = CompiledSegments("inductor")
    expected = gradients(segments)
    assert added == []  # unplanned code is torch's own
    key = str(segments.last_key)
    graph = segments.graphs[key]
    relu = next(i for i, n in enumerate(graph.nodes) if n.op == "aten.relu.default")
    assert relu in graph.unplanned
    kept = {_saved(graph, i) for i in graph.unplanned} - {graph.nodes[relu].name}
    actual = gradients(segments, key=key, saved=sorted(kept))
    assert added and added[-1] > 0
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    segments.close()
