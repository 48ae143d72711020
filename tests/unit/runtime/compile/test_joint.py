"""What torch traced, as a JointGraph: roles, storages, what may be saved or run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memfit.ir.joint_graph import JointGraph, Node
from memfit.ir.source import Source
from memfit.runtime.compile.compiled import CompiledSegments
from memfit.runtime.compile.joint import is_random, read_by_backward, structure_of


def graph_of(module: nn.Module, *args: Any, executor: str = "graph") -> JointGraph:
    """The joint graph of a module's forward."""
    segments = CompiledSegments(executor)
    with segments.measuring():
        segments(module.forward, args, {})
    segments.close()
    return segments.graphs[str(segments.last_key)]


def named(graph: JointGraph, op: str, role: str | None = None) -> list[Node]:
    return [n for n in graph.nodes if n.op == op and role in (None, n.role)]


def _input(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


class Scaled(nn.Module):
    """A linear layer, a buffer that scales it, dropout, and a tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.register_buffer("scale", torch.full((6,), 2.0))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale + shift
        return torch.tanh(F.dropout(y, 0.5, self.training))


@pytest.fixture(scope="module")
def scaled() -> JointGraph:
    return graph_of(Scaled(), _input(2, 3, 4), torch.ones(6))


def test_nodes_stand_in_the_order_of_the_roles(scaled: JointGraph) -> None:
    order = {"parameter": 0, "input": 0, "forward": 1, "tangent": 2, "backward": 3}
    ranks = [order[node.role] for node in scaled.nodes]
    assert ranks == sorted(ranks)
    assert all(i < n for n, node in enumerate(scaled.nodes) for i in node.inputs)


def test_parameters_and_buffers_are_parameters_and_arguments_inputs(scaled: JointGraph) -> None:
    shapes = {role: sorted(n.shape for n in scaled.nodes if n.role == role) for role in ROLES}
    assert shapes["parameter"] == ["float32[6, 4]", "float32[6]", "float32[6]"]
    assert shapes["input"] == ["float32[2, 3, 4]", "float32[6]"]
    assert shapes["tangent"] == ["float32[2, 3, 6]"]


ROLES = ("parameter", "input", "tangent")


def test_outputs_and_gradients(scaled: JointGraph) -> None:
    (output,) = scaled.outputs
    assert scaled.nodes[output].op == "aten.tanh.default"
    shapes = [scaled.nodes[i].shape for i in scaled.gradients]
    assert sorted(shapes) == ["float32[2, 3, 4]", "float32[6, 4]", "float32[6]"]


def test_views_share_the_storage_of_their_base_and_are_not_saved(scaled: JointGraph) -> None:
    (addmm,) = named(scaled, "aten.addmm.default")
    view = next(
        n for n in scaled.nodes if n.inputs == (scaled.index[addmm.name],) and "view" in n.op
    )
    assert view.storages == addmm.storages
    assert addmm.can_save and not view.can_save and view.can_recompute
    (storage,) = addmm.storages
    assert scaled.storages[storage].maker == scaled.index[addmm.name]
    assert scaled.storages[storage].bytes == addmm.bytes == 2 * 3 * 6 * 4


def test_parts_of_a_result_have_their_own_storages(scaled: JointGraph) -> None:
    (dropout,) = named(scaled, "aten.native_dropout.default")
    number = scaled.index[dropout.name]
    parts = [n for n in scaled.nodes if n.op == "getitem" and n.inputs == (number,)]
    assert [n.shape for n in parts] == ["float32[2, 3, 6]", "bool[2, 3, 6]"]
    assert dropout.storages == tuple(s for part in parts for s in part.storages)
    assert not dropout.can_save and all(part.can_save for part in parts)
    assert dropout.random and dropout.can_recompute
    assert dropout.state_bytes == torch.get_rng_state().nbytes
    assert not any(part.state_bytes for part in parts)


def test_the_source_names_the_line_without_folders(scaled: JointGraph) -> None:
    (addmm,) = named(scaled, "aten.addmm.default")
    assert Source.read(addmm.source).words.startswith("linear test_joint.py:")
    (tanh,) = named(scaled, "aten.tanh.default")
    source = Source.read(tanh.source)
    assert (source.module, source.file) == ("", "test_joint.py")
    assert source.code == "return torch.tanh(F.dropout(y, 0.5, self.training))"
    assert "/" not in tanh.source


def test_the_key_tells_structure_and_sizes_apart(scaled: JointGraph) -> None:
    module, shift = Scaled(), torch.ones(6)
    assert graph_of(module, _input(2, 3, 4), shift).key == scaled.key
    other = graph_of(module, _input(1, 3, 4), shift)
    assert other.key != scaled.key
    assert structure_of(other.key) == structure_of(scaled.key)
    module.eval()
    assert structure_of(graph_of(module, _input(2, 3, 4), shift).key) != structure_of(scaled.key)


def test_unplanned_saves_what_the_backward_reads(scaled: JointGraph) -> None:
    saved = [scaled.nodes[i] for i in scaled.unplanned]
    assert tuple(n.name for n in saved) == read_by_backward(scaled)
    assert all(n.can_save for n in saved)
    again = [scaled.nodes[i] for i in scaled.recomputed(frozenset(scaled.unplanned))]
    assert all(not n.can_save for n in again), "only views are recomputed"


class Powers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).pow(3)


def test_work_of_the_backward_that_needs_no_gradient_stays_there() -> None:
    graph = graph_of(Powers(), _input(4))
    squares = [n for n in named(graph, "aten.pow.Tensor_Scalar") if n.role == "backward"]
    assert len(squares) == 1
    assert [graph.nodes[i].op for i in graph.unplanned] == ["aten.mul.Tensor"]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).sin()


def test_running_statistics_are_outputs_and_are_not_read_again() -> None:
    graph = graph_of(Norm(), _input(8, 4))
    assert len(graph.outputs) == 4  # mean, variance, number of batches, and the result
    (norm,) = named(graph, "aten._native_batch_norm_legit_functional.default")
    assert norm.can_recompute
    (backward,) = named(graph, "aten.native_batch_norm_backward.default")
    read = [graph.nodes[i] for i in backward.inputs]
    assert sum(n.role == "parameter" for n in read) == 1, "the weight, no statistics"
    (count,) = named(graph, "aten.add.Tensor", "forward")
    assert not count.can_recompute, "it counts batches"


class Selecting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return first.sin() * second.t()[0]


def test_parts_of_a_view_are_views() -> None:
    graph = graph_of(Selecting(), _input(4, 8))
    (given,) = (n for n in graph.nodes if n.role == "input")
    parts = [n for n in graph.nodes if n.op == "getitem"]
    assert parts and all(n.storages == given.storages and not n.can_save for n in parts)


def test_storages_are_rounded_on_cuda_only() -> None:
    from memfit.runtime.compile.joint import _round

    assert _round(100, torch.device("cpu")) == 100
    assert [_round(n, torch.device("cuda")) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]


@pytest.fixture
def own_operator() -> Any:
    @torch.library.custom_op("memfit_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, gradient: 2 * gradient)
    return twice


def test_operators_of_other_libraries_run_once(own_operator: Callable[..., Any]) -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return own_operator(x.exp()).sin()

    graph = graph_of(Own(), _input(4))
    (own,) = (n for n in graph.nodes if "twice" in n.op and n.role == "forward")
    assert own.can_save and not own.can_recompute


class Attending(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout)


def test_attention_without_dropout_is_not_random() -> None:
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    assert not is_random(graph.call_function(operator, (x, x, x)))
    assert not is_random(graph.call_function(operator, (x, x, x, 0.0, True)))
    assert is_random(graph.call_function(operator, (x, x, x, 0.1)))
    assert not any(n.random for n in graph_of(Attending(0.0), _input(1, 2, 8, 8)).nodes)
    assert any(n.random for n in graph_of(Attending(0.1), _input(1, 2, 8, 8)).nodes)


def test_the_graph_of_inductor_keeps_its_seeds() -> None:
    graph = graph_of(Scaled(), _input(2, 3, 4), torch.ones(6), executor="inductor")
    (seeds,) = named(graph, "prims.inductor_seeds.default")
    assert seeds.can_save and not seeds.can_recompute
    (numbers,) = named(graph, "prims.inductor_random.default")
    assert numbers.can_recompute and not numbers.random
    assert any(n.seconds > 0 for n in named(graph, "aten.addmm.default"))
