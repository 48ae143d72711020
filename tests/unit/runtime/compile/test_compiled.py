"""Compiled segments give the eager numbers whatever they keep, and really keep what was chosen."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memfit.errors import PlanFileError
from memfit.ir.joint_graph import JointGraph
from memfit.measure.allocations import mark, record
from memfit.runtime.compile.choice import CannotCapture
from memfit.runtime.compile.compiled import CompiledSegments, compiled_segments
from memfit.runtime.compile.joint import input_sizes

Chooser = Callable[[JointGraph], Sequence[int] | None]


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Bottleneck(nn.Module):
    """Convolutions with batch norm, in-place ReLU and an in-place shortcut."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        inner = width // 2
        self.conv1, self.norm1 = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3, self.norm3 = nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm3(self.conv3(self.relu(self.norm2(self.conv2(y)))))
        y += x
        return self.relu(y)


class Chain(nn.Module):
    """Blocks one after another."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


@dataclass
class Case:
    """A model, the modules that are segments, its inputs, and its loss."""

    model: nn.Module
    blocks: Callable[[Any], Sequence[nn.Module]]
    inputs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor] = lambda output: output

    def twin(self) -> Case:
        return Case(copy.deepcopy(self.model), self.blocks, self.inputs, self.loss)


def _chain(blocks: Sequence[nn.Module], x: torch.Tensor) -> Case:
    return Case(Chain(blocks), lambda model: model.blocks, {"x": x})


def _dropout_blocks(count: int = 2, dropout: float = 0.1) -> Case:
    return _chain([Block(dropout=dropout) for _ in range(count)], _input(4, 6, 16))


def _bottlenecks() -> Case:
    return _chain([Bottleneck() for _ in range(2)], _input(4, 8, 6, 6))


def _encoder_layers() -> Case:
    layers = [nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True) for _ in range(2)]
    return _chain(layers, _input(2, 6, 16))


def _language_model(name: str, **options: Any) -> Case:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=50, bos_token_id=0, eos_token_id=0, **options
    )
    model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else "LlamaForCausalLM")
    tokens = torch.randint(0, 50, (2, 8))
    return Case(
        model(config).train(),
        lambda m: m.transformer.h if name == "GPT2" else m.model.layers,
        {"input_ids": tokens, "labels": tokens, "use_cache": False},
        lambda output: output.loss,
    )


def _gpt2(layers: int = 2) -> Case:
    return _language_model("GPT2", n_layer=layers, n_embd=16, n_head=2, n_positions=16)


def _llama() -> Case:
    return _language_model(
        "Llama",
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
    )


def _input(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


MODELS = {
    "dropout": _dropout_blocks,
    "batch norm": _bottlenecks,
    "encoder layer": _encoder_layers,
    "GPT-2": _gpt2,
    "Llama": _llama,
}


def unplanned(graph: JointGraph) -> None:
    return None


def only_inputs(graph: JointGraph) -> list[int]:
    """The inputs and what cannot be recomputed."""
    return [
        i
        for i, node in enumerate(graph.nodes)
        if node.can_save and (node.role == "input" or not node.can_recompute)
    ]


def some(graph: JointGraph) -> list[int]:
    return sorted({*only_inputs(graph), *graph.unplanned[::2]})


@contextmanager
def replaced(
    segments: CompiledSegments, modules: Sequence[nn.Module], choose: Chooser
) -> Iterator[list[str | None]]:
    """Run modules through `segments`; the keys of the graphs that ran, in order.

    A module's first call is unplanned, so that the graph to choose from is known.
    """
    keys: list[str | None] = []

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        keys.append(None)
        graph = known.get(id(forward.__self__))  # type: ignore[attr-defined]
        saved = None if graph is None else choose(graph)
        names = None if graph is None or saved is None else [graph.nodes[i].name for i in saved]
        key = None if graph is None else graph.key
        output = segments(forward, args, kwargs, key=key, saved=names)
        keys[-1] = segments.last_key
        if segments.last_key is not None:
            known[id(forward.__self__)] = segments.graphs[segments.last_key]  # type: ignore[attr-defined]
        return output

    known: dict[int, JointGraph] = {}
    for module in modules:
        module.forward = partial(run, module.forward)  # type: ignore[method-assign, assignment]
    try:
        yield keys
    finally:
        for module in modules:
            del module.forward


def step(case: Case, autocast: bool = False) -> list[Any]:
    """Loss, gradients, buffers and generator state of one step from a fixed seed."""
    torch.manual_seed(7)
    case.model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = case.loss(case.model(**case.inputs))
    loss.backward()
    return [
        loss.detach().clone(),
        {n: p.grad.clone() for n, p in case.model.named_parameters() if p.grad is not None},
        {n: b.clone() for n, b in case.model.named_buffers()},
        torch.get_rng_state(),
    ]


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def planned_step(
    case: Case, segments: CompiledSegments, choose: Chooser, autocast: bool = False
) -> list[Any]:
    """A second step, run by what `choose` says of the graphs of a first, unplanned one."""
    with replaced(segments, case.blocks(case.model), choose):
        step(case, autocast)
        return step(case, autocast)


@pytest.fixture
def segments() -> Iterator[CompiledSegments]:
    made = CompiledSegments("graph")
    yield made
    made.close()


@pytest.mark.parametrize("name", MODELS)
def test_every_choice_gives_the_numbers_of_eager_code(
    name: str, segments: CompiledSegments
) -> None:
    torch.manual_seed(0)
    case = MODELS[name]()
    eager = case.twin()
    step(eager)
    expected = step(eager)
    for choose in (unplanned, only_inputs, some):
        assert_same(planned_step(case.twin(), segments, choose), expected)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["dropout", "batch norm"])
def test_any_set_gives_the_numbers_of_eager_code(
    name: str, seed: int, segments: CompiledSegments
) -> None:
    torch.manual_seed(0)
    case = MODELS[name]()
    eager = case.twin()
    step(eager)
    chooser = random.Random(seed)

    def choose(graph: JointGraph) -> list[int]:
        kept = [i for i, n in enumerate(graph.nodes) if n.can_save and chooser.random() < 0.3]
        return sorted({*only_inputs(graph), *kept})

    assert_same(planned_step(case.twin(), segments, choose), step(eager))


@pytest.mark.parametrize("name", MODELS)
def test_under_autocast_every_choice_gives_the_unplanned_numbers(
    name: str, segments: CompiledSegments
) -> None:
    torch.manual_seed(0)
    case = MODELS[name]()
    eager = case.twin()
    step(eager, autocast=True)
    expected = step(eager, autocast=True)
    plain = planned_step(case.twin(), segments, unplanned, autocast=True)
    # Traced code rounds to bfloat16 in other places than autocast does: a few of its 8 bits.
    torch.testing.assert_close(plain, expected, rtol=0.05, atol=0.02)
    for choose in (only_inputs, some):
        assert_same(planned_step(case.twin(), segments, choose, autocast=True), plain)


def test_alike_blocks_are_compiled_once_for_each_choice(segments: CompiledSegments) -> None:
    case = _gpt2(layers=4)
    for compilations, choose in ((1, unplanned), (2, only_inputs), (3, some)):
        planned_step(case, segments, choose)
        assert segments.compilations == compilations
    assert len(segments.graphs) == 1


def test_a_first_block_whose_input_needs_no_gradient_is_a_graph_of_its_own(
    segments: CompiledSegments,
) -> None:
    case = _dropout_blocks(4)
    case.inputs = {"x": case.inputs["x"].detach()}
    with replaced(segments, case.blocks(case.model), unplanned) as keys:
        step(case)
    assert segments.compilations == 2
    assert keys[0] != keys[1] and len(set(keys[1:])) == 1


def _held(segments: CompiledSegments, module: nn.Module, x: torch.Tensor, **plan: Any) -> int:
    """Bytes a compiled call holds after its forward, its output left out."""
    run = segments.bind(module.forward, **plan)
    run(x)
    outputs = []

    def forward() -> None:
        outputs.append(run(x))
        mark("forward done")

    live = 0
    for event in record(forward, torch.device("cpu")):
        if event.kind == "mark":
            return live - sum(o.untyped_storage().nbytes() for o in outputs)
        live += event.bytes if event.kind == "alloc" else -event.bytes
    raise AssertionError("the mark was not seen")


def test_only_what_was_chosen_is_held(segments: CompiledSegments) -> None:
    block, x = Block(32), _input(8, 16, 32)
    everything = _held(segments, block, x)
    key = segments.last_key
    assert key is not None
    graph = segments.graphs[key]
    chosen = next(i for i in graph.unplanned if graph.nodes[i].op == "aten.addmm.default")
    states = sum(n.state_bytes for n in graph.nodes)
    inputs = [i for i, n in enumerate(graph.nodes) if n.role == "input"]

    def held(saved: Sequence[int]) -> int:
        return _held(segments, block, x, key=key, saved=[graph.nodes[i].name for i in saved])

    assert held(inputs) == states
    assert held([*inputs, chosen]) == states + graph.nodes[chosen].bytes
    assert held(graph.unplanned) == everything
    assert states + graph.nodes[chosen].bytes < everything


def test_a_smaller_batch_runs_by_the_plan_of_a_larger_one(segments: CompiledSegments) -> None:
    block = Block(dropout=0.0)
    segments(block.forward, (_input(4, 6, 16),), {})
    key = segments.last_key
    assert key is not None
    graph = segments.graphs[key]
    saved = [graph.nodes[i].name for i in only_inputs(graph)]
    small, again = _input(2, 6, 16), None
    again = small.detach().clone().requires_grad_()
    segments(block.forward, (small,), {}, key=key, saved=saved).sum().backward()
    assert segments.last_key not in (None, key)
    block(again).sum().backward()
    assert_same(small.grad, again.grad)


@pytest.mark.parametrize("planned", [True, False])
def test_a_batch_of_one_may_be_another_graph(planned: bool, segments: CompiledSegments) -> None:
    """torch copies less when a size is 1: everything is recomputed then, or kept if it was."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    segments(layer.forward, (_input(2, 6, 16),), {})
    graph = segments.graphs[str(segments.last_key)]
    saved = [graph.nodes[i].name for i in some(graph)] if planned else None
    one, again = _input(1, 6, 16), None
    again = one.detach().clone().requires_grad_()
    segments(layer.forward, (one,), {}, key=graph.key, saved=saved).sum().backward()
    layer(again).sum().backward()
    assert_same(one.grad, again.grad)
    assert len(segments.notes([graph.key])) == (1 if planned else 0)


def test_a_plan_for_other_operators_is_refused(segments: CompiledSegments) -> None:
    segments(Block().forward, (_input(4, 6, 16),), {})
    key = segments.last_key
    assert key is not None
    graph = segments.graphs[key]
    saved = tuple(graph.nodes[i].name for i in graph.unplanned)
    without = Block(dropout=0.0)
    for names in (saved, None):
        with pytest.raises(PlanFileError, match=r"Block no longer runs .*\nhint: "):
            segments(without.forward, (_input(4, 6, 16),), {}, key=key, saved=names)


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("under", [True, False])
def test_other_autocast_settings_than_planned_are_refused(
    under: bool, planned: bool, segments: CompiledSegments
) -> None:
    """Inputs of other dtypes passed for other shapes, for which it recomputed all it could."""
    block = Block(dropout=0.0)

    def run(autocast: bool, rows: int = 4, **plan: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            x = _input(rows, 6, 16)
            segments(block.forward, (x.bfloat16() if autocast else x,), {}, **plan)

    run(under)
    graph = segments.graphs[str(segments.last_key)]
    saved = [graph.nodes[i].name for i in only_inputs(graph)] if planned else None
    for ran_before in (False, True):
        with pytest.raises(PlanFileError, match=r"no longer runs .*\nhint: .*autocast settings"):
            run(not under, key=graph.key, saved=saved)
        if not ran_before:
            run(under, key=graph.key, saved=saved)
    run(under, rows=3, key=graph.key, saved=saved)
    assert not segments.notes([graph.key])


def test_other_autocast_settings_for_sizes_that_ran_before(segments: CompiledSegments) -> None:
    """`OtherShape` came out, an error of our own without a hint."""
    block = Block(dropout=0.0)
    segments(block.forward, (_input(4, 6, 16),), {})
    graph = segments.graphs[str(segments.last_key)]
    saved = [graph.nodes[i].name for i in only_inputs(graph)]
    bound = segments.bind(block.forward, key=graph.key, saved=saved)
    sizes = range(4, 9)  # the last ones by one code with symbolic sizes
    for rows in sizes:
        bound(_input(rows, 6, 16))
    for rows in sizes:
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(PlanFileError, match=r"no longer runs .*\nhint: .*autocast settings"),
        ):
            bound(_input(rows, 6, 16))


def test_other_dtypes_than_planned_are_refused(segments: CompiledSegments) -> None:
    """The operators are the same: only the memory that they take is another."""
    layer = Scaling()
    segments(layer.forward, (_input(4, 16),), {})
    key = str(segments.last_key)
    graph = segments.graphs[key]
    saved = [graph.nodes[i].name for i in graph.unplanned]
    for names in (saved, None):
        with pytest.raises(PlanFileError, match=r"float64 where float32 was .*\nhint: .*autocast"):
            segments(layer.forward, (_input(4, 16).double(),), {}, key=key, saved=names)
        segments(layer.forward, (_input(4, 16),), {}, key=key, saved=names)
        segments(layer.forward, (_input(3, 16),), {}, key=key, saved=names)
    segments(layer.forward, (_input(4, 16).double(),), {})
    wide = str(segments.last_key)
    segments(layer.forward, (_input(4, 16).double(),), {}, key=wide, saved=saved)


class Scaling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (2 * x).exp()


def test_names_that_the_graph_has_not_are_refused(segments: CompiledSegments) -> None:
    block = Block()
    segments(block.forward, (_input(4, 6, 16),), {})
    with pytest.raises(PlanFileError, match=r"keeps 'nonsense' of Block, which has no .*\nhint: "):
        segments(block.forward, (_input(4, 6, 16),), {}, key=segments.last_key, saved=["nonsense"])


class Printing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("seen")
        return super().forward(x)


class Branching(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


class Breaking(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Untraceable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(x.tolist())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class OwnFunction(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Untraceable.apply(super().forward(x))


class Selecting(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[x.sum(-1) > 0]


class Sparse(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.weight.to_sparse(), x)


@pytest.mark.parametrize("kind", [Printing, Branching, Breaking, OwnFunction, Selecting, Sparse])
def test_what_cannot_be_traced_is_named_with_its_line(
    kind: type[nn.Module], segments: CompiledSegments
) -> None:
    with pytest.raises(CannotCapture) as caught:
        segments(kind(4, 4).forward, (_input(4, 4),), {})
    reason = caught.value.reason
    assert reason.startswith(f"{kind.__name__}: ") and "\n" not in reason
    assert "(test_compiled.py:" in reason
    assert caught.value.__cause__ is not None


class WrongShape(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ torch.ones(3, 5)


class Raising(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("bad batch")


@pytest.mark.parametrize(("kind", "text"), [(WrongShape, r"\[3, 5\]"), (Raising, "bad batch")])
def test_an_error_of_the_model_itself_is_told(
    kind: type[nn.Module], text: str, segments: CompiledSegments
) -> None:
    with pytest.raises(CannotCapture, match=text):
        segments(kind(4, 4).forward, (_input(4, 4),), {})


def test_a_forward_that_is_no_method_is_refused(segments: CompiledSegments) -> None:
    with pytest.raises(CannotCapture, match="no method of a module"):
        segments(lambda x: x, (_input(4, 4),), {})


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_a_module_that_compiles_at_every_call_is_given_up(segments: CompiledSegments) -> None:
    module = Counting(4, 4)
    with pytest.raises(CannotCapture, match="changes from call to call"):
        for _ in range(20):
            segments(module.forward, (_input(4, 4),), {})


def test_saved_tensor_hooks_around_a_segment_see_what_it_saves(segments: CompiledSegments) -> None:
    case = _dropout_blocks(1)
    expected = planned_step(case.twin(), segments, unplanned)
    packed: list[int] = []
    unpacked: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.numel())
        return tensor.clone()

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(tensor.numel())
        return tensor

    before = segments.compilations
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        actual = planned_step(case.twin(), segments, unplanned)
    assert packed and len(unpacked) == len(packed)
    assert segments.compilations == before
    assert_same(actual, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_segment_may_stand_inside_a_checkpoint(
    reentrant: bool, segments: CompiledSegments
) -> None:
    block = Block()
    twin, x = copy.deepcopy(block), _input(4, 6, 16)
    y = x.detach().clone().requires_grad_()
    torch.manual_seed(1)
    checkpoint(twin, y, use_reentrant=reentrant).sum().backward()
    torch.manual_seed(1)
    run = segments.bind(block.forward)
    checkpoint(run, x, use_reentrant=reentrant).sum().backward()
    assert_same(x.grad, y.grad)
    assert_same([p.grad for p in block.parameters()], [p.grad for p in twin.parameters()])


def test_tied_weights_and_modules_called_twice(segments: CompiledSegments) -> None:
    blocks = [Block(), Block()]
    blocks[1].up.weight = blocks[0].up.weight
    case = _chain([blocks[0], blocks[1], blocks[0]], _input(4, 6, 16))
    eager = case.twin()
    step(eager)
    expected = step(eager)
    case.blocks = lambda model: list(dict.fromkeys(model.blocks))
    assert_same(planned_step(case, segments, only_inputs), expected)


@dataclass
class Output:
    hidden: torch.Tensor
    extra: tuple[torch.Tensor, None]


class Structured(Block):
    def forward(self, x: torch.Tensor, *, scale: float, bias: Any = None) -> Any:  # type: ignore[override]
        y = super().forward(x) * scale + bias["value"]
        return Output(y, (y.mean(-1), None))


def test_keywords_and_structured_outputs(segments: CompiledSegments) -> None:
    block, x = Structured(), _input(4, 6, 16)
    options = {"scale": 0.5, "bias": {"value": torch.ones(16)}}
    torch.manual_seed(1)
    expected = block(x, **options)
    torch.manual_seed(1)
    actual = segments(block.forward, (x,), options)
    assert isinstance(actual, Output) and actual.extra[1] is None
    assert_same([actual.hidden, actual.extra[0]], [expected.hidden, expected.extra[0]])


def test_evaluation_and_no_gradients(segments: CompiledSegments) -> None:
    block, x = Bottleneck(), _input(4, 8, 6, 6)
    block.eval()
    assert_same(segments(block.forward, (x,), {}), block(x))
    assert segments.last_key is not None
    with torch.no_grad():
        assert_same(segments(block.forward, (x,), {}), block(x))
    assert segments.last_key is None


def test_the_graph_may_be_retained(segments: CompiledSegments) -> None:
    block, x = Block(dropout=0.0), _input(4, 6, 16)
    loss = segments(block.forward, (x,), {}).sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()  # type: ignore[union-attr]
    loss.backward()
    assert_same(x.grad, 2 * once)


class ChangesInput(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.relu_(x))


def test_an_input_changed_in_place_is_not_read_again(segments: CompiledSegments) -> None:
    module, x = ChangesInput(8, 8), _input(4, 8)
    y = x.detach().clone().requires_grad_()
    segments(module.forward, (x * 1,), {})
    graph = segments.graphs[str(segments.last_key)]
    assert not any(n.can_save for n in graph.nodes if n.role == "input")
    saved = [graph.nodes[i].name for i in only_inputs(graph)]
    segments(module.forward, (x * 1,), {}, key=graph.key, saved=saved).sum().backward()
    module(y * 1).sum().backward()
    assert_same(x.grad, y.grad)


class Checkpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


def test_a_checkpoint_inside_a_segment_is_honoured_unplanned(segments: CompiledSegments) -> None:
    module = Checkpointed(dropout=0.0)
    segments(module.forward, (_input(4, 6, 16),), {})
    graph = segments.graphs[str(segments.last_key)]
    assert [graph.nodes[i].role for i in graph.unplanned] == ["input"]


def test_nothing_keeps_a_module_alive(segments: CompiledSegments) -> None:
    block, x = Block(), _input(4, 6, 16)
    segments(block.forward, (x,), {}).sum().backward()
    references = [weakref.ref(block), weakref.ref(block.up.weight), weakref.ref(x)]
    del block, x
    gc.collect()
    assert [r() for r in references] == [None, None, None]


def test_watching_names_what_goes_in_and_comes_out(segments: CompiledSegments) -> None:
    block, x = Block(), _input(4, 6, 16)
    seen: dict[str, torch.Tensor] = {}
    with segments.watched(seen.__setitem__):
        output = segments(block.forward, (x,), {})
    graph = segments.graphs[str(segments.last_key)]
    inputs = [n.name for n in graph.nodes if n.role == "input"]
    results = [graph.nodes[i].name for i in (*graph.outputs, *graph.unplanned)]
    assert {*inputs, *results} <= seen.keys()
    assert seen[inputs[0]].data_ptr() == x.data_ptr()
    assert seen[graph.nodes[graph.outputs[0]].name].data_ptr() == output.data_ptr()


def test_measuring_fills_in_costs_and_leaves_no_trace(segments: CompiledSegments) -> None:
    case = _bottlenecks()
    eager = case.twin()
    expected = step(eager)
    with replaced(segments, case.blocks(case.model), unplanned), segments.measuring():
        assert_same(step(case), expected)
    (graph,) = segments.graphs.values()
    work = [n for n in graph.nodes if n.role in ("forward", "backward") and n.op != "getitem"]
    assert all(n.seconds > 0 for n in work)
    assert any(n.workspace_bytes > 0 for n in work)


def test_dropout_masks_are_the_same_after_measuring(segments: CompiledSegments) -> None:
    case = _dropout_blocks(1)
    expected = step(case.twin())
    with replaced(segments, case.blocks(case.model), unplanned), segments.measuring():
        assert_same(step(case), expected)


def test_a_process_shares_its_compiled_code() -> None:
    assert compiled_segments("graph") is compiled_segments("graph")


def test_a_module_that_ran_is_compiled_again_with_the_right_settings(
    segments: CompiledSegments,
) -> None:
    """Settings change only to compile: dynamo's limit of 8 must not count, nor stay changed."""
    block = Block(dropout=0.0)
    before = dict(torch._dynamo.config.get_config_copy())
    for rows in range(2, 14):
        x = _input(rows, 6, 16)
        assert_same(segments(block.forward, (x,), {}), block(x))
        graph = segments.graphs[str(segments.last_key)]
        assert input_sizes(graph) == [f"[{rows}, 6, 16]"]
    assert segments.compilations == 12
    assert torch._dynamo.config.get_config_copy() == before


@pytest.mark.slow
def test_inductor_runs_the_chosen_set_on_the_graph_that_was_measured() -> None:
    segments = CompiledSegments("inductor")
    block, x = Block(), _input(4, 6, 16)
    with segments.measuring():
        segments(block.forward, (x,), {})
    key = str(segments.last_key)
    graph = segments.graphs[key]
    assert any("seed" in n.op and n.can_save and not n.can_recompute for n in graph.nodes)
    gradients = []
    for saved in (None, [graph.nodes[i].name for i in only_inputs(graph)]):
        torch.manual_seed(3)
        x.grad = None
        segments(block.forward, (x,), {}, key=key, saved=saved).square().sum().backward()
        assert segments.last_key == key
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    segments.close()
