"""A step launched as CUDA graphs, on a CPU: a stand-in records operators and runs them again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfit.capture import seconds
from memfit.capture.profile import profile_workload
from memfit.ir.plan import Plan
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime.apply import Applied
from memfit.runtime.cuda_graphs import Cuda, CudaGraphs
from memfit.workload import Workload


class Graph:
    """Operators with the tensors they read and wrote, to be run on these again."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any, Any, Any]] = []
        self.overwrites: list[Any] = []  # memory that some operator uses meanwhile

    def replay(self) -> None:
        with torch.no_grad():
            for tensor in self.overwrites:
                if tensor is not None:
                    tensor.fill_(float("nan"))
            for function, args, kwargs, results in self.steps:
                again = function(*args, **kwargs)
                for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Recording(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        self.graph.steps.append((function, args, kwargs or {}, results))
        return results


class OnCpu(Cuda):
    """What is recorded is run as well, for there is no other way to learn its shapes: buffers and
    random numbers are put back."""

    def __init__(self, model: nn.Module, failure: Exception | None = None) -> None:
        self.model, self.failure = model, failure
        self.captures = self.mended = 0

    def graph(self) -> Graph:
        return Graph()

    def pool(self) -> str:
        return "memory"

    @contextmanager
    def recording(self, graph: Graph, pool: Any) -> Iterator[None]:
        self.captures += 1
        buffers = [b.clone() for b in self.model.buffers()]
        with Recording(graph):
            yield
        for buffer, old in zip(self.model.buffers(), buffers, strict=True):
            buffer.data.copy_(old)  # no new version: to autograd nothing happened
        if self.failure is not None:
            raise self.failure

    def clear(self, device: torch.device) -> None: ...

    def mend(self, device: torch.device, pool: Any) -> None:
        self.mended += 1

    def hidden_bytes(self, device: torch.device) -> int:
        return 7


class ConvNet(nn.Module):
    def __init__(self, dropout: float = 0.0, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self._block(3 if i == 0 else 8, dropout) for i in range(blocks))
        self.head = nn.Linear(8, 5)
        self.unused = nn.Linear(2, 2)

    @staticmethod
    def _block(channels: int, dropout: float) -> nn.Sequential:
        layers = [nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        return nn.Sequential(*layers, nn.Dropout(dropout))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            images = block(images)
        return self.head(images.mean((2, 3)))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def batch_of(seed: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 3, 8, 8, generator=generator)
    return images, torch.randint(5, (size,), generator=generator)


class Twins:
    """A model that runs as graphs, and the same one that runs as ever."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.plain = ConvNet(**options)
        self.model = copy.deepcopy(self.plain)
        self.cuda = OnCpu(self.model)
        self.graphs = CudaGraphs(self.model, self.cuda)
        self.skipped = 0
        models = (self.plain, self.model)
        self.optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in models]

    def skip(self) -> None:
        self.skipped += 1

    def backward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        plain = loss_of(self.plain, batch)
        plain.backward()
        with self.graphs.at_work(self.skip):
            loss = loss_of(self.model, batch)
            loss.backward()
        return plain.detach(), loss.detach()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        """Everything is the same, bit for bit."""
        for (name, one), other in zip(
            self.plain.named_parameters(), self.model.parameters(), strict=True
        ):
            assert torch.equal(one, other), name
            assert (one.grad is None) == (other.grad is None), name
            assert one.grad is None or torch.equal(one.grad, other.grad), name
        for one, other in zip(self.plain.buffers(), self.model.buffers(), strict=True):
            assert torch.equal(one, other)


def test_steps_give_the_same_numbers() -> None:
    twins = Twins()
    for seed in range(5):
        plain, loss = twins.backward(batch_of(seed))
        assert torch.equal(plain, loss)
        twins.check()
        twins.step()
    assert twins.cuda.captures == 2  # a forward and a backward
    assert twins.skipped == twins.graphs.replays == 4
    assert twins.graphs.hidden_bytes == 7


def test_gradients_add_up() -> None:
    twins = Twins()
    first: Any = None
    for seed in range(3):
        for part in range(3):
            twins.backward(batch_of(10 * seed + part))
            captured: Any = twins.graphs._captured
            if captured is not None:  # gradients lie where activations of the forward lay
                captured.forward.overwrites = captured.gradients
            first = first if part else twins.model.head.weight.grad
            assert first is twins.model.head.weight.grad, "whoever has it sees it grow"
        twins.check()
        twins.step()
    assert twins.graphs.replays == 8


def test_gradients_that_are_kept_elsewhere_are_left_alone() -> None:
    twins = Twins()
    kept = []
    for seed in range(8):
        twins.backward(batch_of(seed))
        twins.check()
        weights = twins.plain.head.weight, twins.model.head.weight
        if seed in (2, 5):
            kept.append([w.grad for w in weights])
        twins.step()
        twins.plain.zero_grad()
        twins.model.zero_grad()
    for expected, found in kept:
        assert torch.equal(expected, found)
    # As graphs but for the first, the one after each that was kept, and the ones that capture anew.
    assert twins.graphs.refused is None and twins.graphs.replays == 5
    for seed in range(6):
        twins.backward(batch_of(seed))
        kept.append([twins.plain.head.weight.grad, twins.model.head.weight.grad])
        twins.plain.zero_grad()
        twins.model.zero_grad()
    assert twins.graphs.refused == "gradients of earlier steps are kept"
    for expected, found in kept:
        assert torch.equal(expected, found)


def test_outputs_are_left_alone_by_the_next_step() -> None:
    twins = Twins()
    with twins.graphs.at_work(twins.skip):
        outputs = []
        for seed in range(4):
            output = twins.model(batch_of(seed)[0])
            output.sum().backward()
            outputs.append(output.detach())
        kept = [o.clone() for o in outputs]
        twins.model(batch_of(9)[0])
    assert twins.graphs.replays == 4
    assert all(torch.equal(a, b) for a, b in zip(kept, outputs, strict=True))
    assert not torch.equal(outputs[2], outputs[3])


def test_a_forward_whose_backward_waits_is_not_overwritten() -> None:
    twins = Twins()
    for seed in range(3):
        twins.backward(batch_of(seed))
        twins.step()
    one, two = batch_of(20), batch_of(21)
    (loss_of(twins.plain, one) + loss_of(twins.plain, two)).backward()
    with twins.graphs.at_work(twins.skip):
        (loss_of(twins.model, one) + loss_of(twins.model, two)).backward()
    twins.check()


def test_a_second_backward_is_refused() -> None:
    twins = Twins()
    twins.backward(batch_of(0))
    with twins.graphs.at_work(twins.skip):
        loss = loss_of(twins.model, batch_of(1))
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="can run once"):
            loss.backward()


Change = Callable[[Twins], Any]


def _freeze(twins: Twins) -> None:
    for model in (twins.plain, twins.model):
        model.blocks[1].eval()


def _train_less(twins: Twins) -> None:
    for model in (twins.plain, twins.model):
        model.head.weight.requires_grad_(False)


def _move(twins: Twins) -> None:
    for model in (twins.plain, twins.model):
        model.head.weight.data = model.head.weight.data.clone() * 2


@pytest.mark.parametrize("change", [_freeze, _train_less, _move])
def test_what_changes_in_the_model_is_seen(change: Change) -> None:
    twins = Twins()
    for seed in range(3):
        twins.backward(batch_of(seed))
        twins.step()
    change(twins)
    before = twins.graphs.replays
    for seed in range(3):
        plain, loss = twins.backward(batch_of(30 + seed))
        assert torch.equal(plain, loss)
        twins.check()
        twins.step()
    assert twins.graphs.replays == before + 2  # the first runs as ever, then it is captured again


def test_other_shapes_run_as_ever() -> None:
    twins = Twins()
    for size in (4, 4, 3, 4, 4, 4):
        twins.backward(batch_of(size, size))
        twins.check()
        twins.step()
    assert twins.graphs.replays == 1 + 2
    assert twins.cuda.captures == 4


def test_without_gradients_it_runs_as_ever_and_memory_is_given_back() -> None:
    twins = Twins()
    for seed in range(2):
        twins.backward(batch_of(seed))
        twins.step()
    with twins.graphs.at_work(twins.skip), torch.no_grad():
        twins.model(batch_of(3)[0])
        twins.plain(batch_of(3)[0])
    assert twins.graphs.hidden_bytes == 0
    twins.backward(batch_of(4))
    twins.check()


def test_random_numbers_are_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    twins = Twins(dropout=0.5)
    for seed in range(3):
        twins.backward(batch_of(seed))
        twins.step()
    assert twins.graphs.refused == "its forward draws random numbers"
    assert "ConvNet is not run as CUDA graphs" in caplog.text
    assert twins.cuda.captures == twins.graphs.replays == 0


class Counting(ConvNet):
    """Does something in Python, by what it is told to do."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.count, self.losses, self.by_name = what, 0, [], {"calls": 0}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        exec(self.what)
        return super().forward(images)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("self.count += 1", "the attribute count of a Counting"),
        ("self.losses.append(1.0)", "the attribute losses of a Counting"),
        ("self.by_name['calls'] += 1", "the attribute by_name of a Counting"),
        ("self.head.seen = images", "the attribute seen of a Linear"),
        ("__import__('random').random()", "random numbers"),
        ("__import__('numpy').random.rand()", "random numbers"),
    ],
)
def test_a_forward_that_leaves_traces_is_not_captured(what: str, why: str) -> None:
    model = Counting(what)
    graphs = CudaGraphs(model, OnCpu(model))
    with graphs.at_work(lambda: None):
        for seed in range(3):
            loss_of(model, batch_of(seed)).backward()
    assert why in str(graphs.refused)
    assert model.count in (0, 3) and len(model.losses) in (0, 3)


def test_a_forward_that_leaves_none_is_captured() -> None:
    model = Counting("self.count = float('nan'); self.count = 0; self.losses.sort()")
    graphs = CudaGraphs(model, OnCpu(model))
    with graphs.at_work(lambda: None):
        for seed in range(3):
            loss_of(model, batch_of(seed)).backward()
    assert graphs.refused is None and graphs.replays == 2


def test_hooks_of_inner_modules_are_called() -> None:
    twins = Twins()
    calls: list[Any] = []
    twins.model.head.register_forward_hook(lambda *_: calls.append(1))
    for seed in range(3):
        twins.backward(batch_of(seed))
    assert len(calls) == 3
    assert not twins.cuda.captures
    assert twins.graphs.as_ever == "a Linear inside has hooks"


def test_hooks_of_parameters_are_called() -> None:
    twins = Twins()
    calls: list[Any] = []
    twins.model.head.weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    for seed in range(3):
        twins.backward(batch_of(seed))
    assert len(calls) == 3
    assert twins.graphs.replays == 2


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError("operation not permitted when stream is capturing\nmore"), "not permitted"),
        (torch.OutOfMemoryError("CUDA out of memory"), "no room"),
    ],
)
def test_a_capture_that_fails_is_said_and_the_step_runs(error: Exception, why: str) -> None:
    twins = Twins()
    twins.cuda.failure = error
    for seed in range(3):
        plain, loss = twins.backward(batch_of(seed))
        assert torch.equal(plain, loss)
        twins.step()
    twins.check()
    assert why in str(twins.graphs.refused)
    assert twins.cuda.captures == 1
    assert twins.cuda.mended == (not twins.graphs.no_room)
    assert twins.graphs.no_room == isinstance(error, torch.OutOfMemoryError)
    twins.graphs.release()
    assert (twins.graphs.refused is None) == isinstance(error, torch.OutOfMemoryError)


def test_an_output_without_gradient_and_other_values_come_back() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *, times: int) -> dict[str, Any]:
            y = self.layer(x) * times
            return {"y": y, "mask": y > 0, "note": "as it is", "nothing": None}

    model = Several()
    graphs = CudaGraphs(model, OnCpu(model))
    with graphs.at_work(lambda: None):
        for number in range(3):
            x = torch.full((2, 4), float(number))
            output = model(x, times=2)
            expected = nn.functional.linear(x, model.layer.weight, model.layer.bias) * 2
            assert torch.equal(output["y"], expected)
            assert torch.equal(output["mask"], expected > 0)
            assert not output["mask"].requires_grad
            assert output["note"] == "as it is" and output["nothing"] is None
            output["y"].sum().backward()
        model(torch.zeros(2, 4), times=3)  # another number is another forward
        assert graphs.replays == 2 and graphs.as_ever == "the first call of its kind"
        model(torch.zeros(2, 4), times=np.int64(3))
        assert graphs.as_ever == "it is given a int64"


class Held:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_an_output_that_may_hold_tensors_is_not_captured() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Held]:
            y = self.layer(x)
            return y, Held(y)

    model = Wrapped()
    graphs = CudaGraphs(model, OnCpu(model))
    with graphs.at_work(lambda: None):
        for _ in range(3):
            output, held = model(torch.randn(2, 4))
            assert held.tensor is output
    assert graphs.refused == "it returns a Held"


def test_autocast_casts_in_every_step() -> None:
    twins = Twins()
    for seed in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            plain, loss = twins.backward(batch_of(seed))
        assert torch.equal(plain, loss)
        twins.check()
        twins.step()
    assert twins.graphs.replays == 3
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("executor", ["module", "graph"])
def test_a_plan_runs_as_graphs(executor: str) -> None:
    torch.manual_seed(0)
    model = ConvNet(blocks=8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    workload = Workload(model, loss_of, optimizer, batch_of(0))
    profile = profile_workload(workload, executor=executor)
    plan = make_plan(profile, Goal(activation_reduction=0.2))
    assert plan.recomputed_bytes > 0 and not plan.cuda_graphs
    assert make_plan(replace(profile, cuda_graphs=True), Goal(strategy="none")).cuda_graphs
    results = [_trained(copy.deepcopy(model), replace(plan, cuda_graphs=g)) for g in (False, True)]
    for one, other in zip(*map(tree_leaves, results), strict=True):
        assert torch.equal(one, other)


def test_compiled_code_is_there_when_a_step_is_captured() -> None:
    """To compile would end the capture."""

    class Unrecorded(OnCpu):
        @contextmanager
        def recording(self, graph: Graph, pool: Any) -> Iterator[None]:
            begun = counters["stats"]["unique_graphs"]
            yield
            self.captures += 1
            assert counters["stats"]["unique_graphs"] == begun

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.two(torch.tanh(self.one(x)))

    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = (torch.randn(256, 16), torch.randint(16, (256,)))
    profile = profile_workload(Workload(model, loss_of, optimizer, batch), executor="graph")
    plan = make_plan(profile, Goal(activation_reduction=0.2))
    applied = Applied(plan, model)
    cuda = Unrecorded(model)
    applied.graphs = CudaGraphs(model, cuda)
    with applied:
        for _ in range(2):
            loss_of(model, batch).backward()
    assert applied.graphs.refused is None and cuda.captures == 2


def _trained(model: nn.Module, plan: Plan) -> Any:
    """Losses and tensors of a model after four steps by the plan."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    applied, losses = Applied(plan, model), []
    if plan.cuda_graphs:
        applied.graphs = CudaGraphs(model, OnCpu(model))
    with applied:
        for seed in range(4):
            loss = loss_of(model, batch_of(seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    assert applied.graphs is None or applied.graphs.replays == 3
    applied.release()
    assert applied.hidden_bytes == 0
    return losses, [p.detach() for p in model.parameters()], list(model.buffers())


@pytest.fixture
def as_if_on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[OnCpu]:
    """Profiles of this CPU capture steps, by stand-ins that are listed here."""
    made: list[OnCpu] = []

    def graphs(model: nn.Module) -> CudaGraphs:
        made.append(OnCpu(model))
        return CudaGraphs(model, made[-1])

    monkeypatch.setattr(seconds, "CudaGraphs", graphs)
    monkeypatch.setattr(seconds.StepTimes, "_why_no_graphs", lambda self: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return made


def _workload(**options: Any) -> Workload:
    torch.manual_seed(0)
    model = ConvNet(**options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return Workload(model, loss_of, optimizer, batch_of(0))


@pytest.mark.parametrize(
    ("host_s", "launched"), [(0.5, False), (0.95, True)], ids=["ahead", "held up"]
)
def test_a_profile_finds_out_who_waits_for_whom(
    as_if_on_cuda: list[OnCpu], monkeypatch: pytest.MonkeyPatch, host_s: float, launched: bool
) -> None:
    monkeypatch.setattr(seconds, "host_and_step_seconds", lambda step, device: (host_s, 1.0))
    workload = _workload()
    before = [p.clone() for p in workload.model.parameters()]
    profile = profile_workload(workload, executor="module", cuda_graphs=None)
    assert profile.cuda_graphs == launched
    # The peak, the plain step's seconds, those with everything recomputed: two graphs each.
    assert as_if_on_cuda[0].captures == (6 if launched else 0)
    assert not any("CUDA graphs" in note for note in profile.notes)
    for one, other in zip(before, workload.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_profile_says_why_a_step_is_not_captured(as_if_on_cuda: list[OnCpu]) -> None:
    profile = profile_workload(_workload(dropout=0.5), executor="module", cuda_graphs=True)
    assert not profile.cuda_graphs
    why = "not launched as CUDA graphs: its forward draws random numbers"
    assert why in profile.notes
