"""Swapped steps give the plain step's numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memfit.runtime.recompute import Recompute
from memfit.runtime.swap.engine import CallMoves
from memfit.runtime.swap.lanes import Lanes
from memfit.workload import Workload

Check = Callable[..., None]


def _autocast(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(batch).float().square().mean()


def _twice(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - model(batch.flip(0))).square().mean()


def _direct(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Calls the model's parts, never the model."""
    x = model.stem(batch)
    for block in model.blocks:
        x = block(x)
    return model.head(x).square().mean()


class Recurrent(nn.Module):
    """An LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.cell = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(self.stem(x))[0])


class Gates(nn.Module):
    """Changes pieces of one storage in place that count apart, as recurrent cells on a GPU do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 32)
        self.cell = Gates.Cell()
        self.head = nn.Linear(8, 4)

    class Cell(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            forget, enter, value, out = (x + 0).unsafe_chunk(4, -1)
            return forget.sigmoid_() * enter.sigmoid_() * value.tanh_() * out.sigmoid_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(self.stem(x)))


class Views(nn.Module):
    """Saves views of one storage: slices, a transposed one, an expanded one, a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 24)
        self.body = Views.Body()
        self.head = nn.Linear(8, 4)

    class Body(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = x.split(8, -1)
            scores = (query @ key.transpose(1, 2)).softmax(-1)
            spectrum = torch.fft.rfft(value, dim=1)
            mixed = torch.fft.irfft(spectrum * spectrum.conj(), n=x.shape[1], dim=1)
            return scores @ value + mixed * value[:, :1].expand_as(mixed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(x)))


STACK = ["stem", *(f"blocks.{i}" for i in range(4)), "head"]
CONV = ["stem", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "head"]
CASES: dict[str, tuple[Callable[[SimpleNamespace], Workload], Sequence[str], int]] = {
    "dropout": (lambda z: z.workload(z.Stack), STACK, 1),
    "tied weights": (lambda z: z.workload(z.TiedStack), STACK[:-1], 1),
    "modules called twice": (lambda z: z.workload(z.Reused), [*STACK[:-1], *STACK[1:]], 1),
    "attention": (
        lambda z: z.workload(z.AttentionNet),
        ["stem", "layers.0", "layers.1", "layers.2", "head"],
        1,
    ),
    "tuples, dicts and keywords": (lambda z: z.workload(z.ArgumentsNet), STACK, 1),
    "skip connections": (lambda z: z.workload(z.SkipNet), ["stem", *STACK[1:5], "blocks.4"], 1),
    "batch norm": (lambda z: z.workload(z.ConvNet, z.images), CONV, 1),
    "in-place relu": (lambda z: z.workload(lambda: z.ConvNet(inplace=True), z.images), CONV, 1),
    "changed buffers": (lambda z: z.workload(z.CountingNet), STACK[:4], 1),
    "autocast": (lambda z: z.workload(z.Stack, loss=_autocast), STACK, 1),
    "recurrent": (lambda z: z.workload(Recurrent), ["stem", "cell", "head"], 1),
    "gates": (lambda z: z.workload(Gates), ["stem", "cell", "head"], 1),
    "views": (lambda z: z.workload(Views), ["stem", "body", "head"], 1),
    "the model called twice": (
        lambda z: z.workload(lambda: z.Stack(blocks=2), loss=_twice),
        [*STACK[:3], "head"] * 2,
        2,
    ),
    "the model never called": (lambda z: z.workload(z.Stack, loss=_direct), STACK, 1),
    "one segment": (lambda z: z.workload(z.Stack), ["blocks.1"], 1),
}


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_every_tensor_moved(
    zoo: SimpleNamespace,
    swapping: SimpleNamespace,
    lanes: Lanes,
    run_numbers: Callable[[Workload, int], Any],
    assert_same: Check,
    case: str,
    ahead: int,
) -> None:
    build, calls, model_calls = CASES[case]
    expected = run_numbers(build(zoo), 3)
    workload = build(zoo)
    moves = swapping.everything(len(calls), ahead)
    with swapping.swapped(
        workload.model, calls, lanes, moves=moves, model_calls=model_calls
    ) as at_work:
        actual = run_numbers(workload, 3)
        statistics = at_work.engine.statistics()
    assert_same(actual, expected)
    assert statistics.steps == 3
    assert statistics.moves == statistics.retrievals + statistics.stayed > 0
    assert statistics.moved_bytes >= statistics.restored_bytes > 0


@pytest.mark.parametrize("runs", [[(1, 1), (3, 3)], [(1, 2)], [(0, 3)], [(2, 4)]])
def test_inputs_of_recomputed_runs_move(
    zoo: SimpleNamespace,
    swapping: SimpleNamespace,
    lanes: Lanes,
    run_numbers: Callable[[Workload, int], Any],
    assert_same: Check,
    runs: list[tuple[int, int]],
) -> None:
    expected = run_numbers(zoo.workload(zoo.Stack), 2)
    workload = zoo.workload(zoo.Stack)
    modules = {i: workload.model.get_submodule(name) for i, name in enumerate(STACK)}
    inner = Recompute(runs, modules)
    for only in (None, {runs[0][0]}, {runs[0][1]}):
        workload = zoo.workload(zoo.Stack)
        inner = Recompute(
            runs, {i: workload.model.get_submodule(name) for i, name in enumerate(STACK)}
        )
        moves = swapping.everything(len(STACK))
        if only is not None:
            moves = {i: moves[i] for i in only}
        with swapping.swapped(workload.model, STACK, lanes, moves=moves, inner=inner) as at_work:
            assert_same(run_numbers(workload, 2), expected)
            assert at_work.engine.statistics().moves > 0 or only == {runs[0][1]}
        assert inner.replays == 2 * len(runs)


def test_a_failing_run_takes_its_hooks_off(
    zoo: SimpleNamespace, swapping: SimpleNamespace, run_numbers: Any, assert_same: Check
) -> None:
    expected = run_numbers(zoo.workload(zoo.Stack), 1)
    workload = zoo.workload(zoo.Stack)
    modules = {i: workload.model.get_submodule(name) for i, name in enumerate(STACK)}
    failing = modules[3].register_forward_pre_hook(_fail)
    with swapping.swapped(workload.model, STACK, inner=Recompute([(1, 4)], modules)) as at_work:
        with pytest.raises(ValueError, match="on purpose"):
            workload.compute_loss()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert at_work.arena.used_bytes == 0
        failing.remove()
        assert_same(run_numbers(workload, 1), expected)


def _fail(*_: Any) -> None:
    raise ValueError("on purpose")


def test_checkpoints_of_the_user_keep_what_is_theirs(
    zoo: SimpleNamespace,
    swapping: SimpleNamespace,
    lanes: Lanes,
    run_numbers: Any,
    assert_same: Any,
) -> None:
    class Checkpointed(zoo.Stack):  # type: ignore[name-defined]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    expected = run_numbers(zoo.workload(zoo.Stack), 2)
    workload = zoo.workload(Checkpointed)
    with swapping.swapped(workload.model, STACK, lanes):
        assert_same(run_numbers(workload, 2), expected)


def test_gradients_accumulate_over_two_backwards(
    zoo: SimpleNamespace, swapping: SimpleNamespace, lanes: Lanes, assert_same: Check
) -> None:
    def gradients(workload: Workload) -> dict[str, Any]:
        torch.manual_seed(3)
        for part in workload.batch.split(2):
            workload.compute_loss(part).backward()
        return {n: p.grad for n, p in workload.model.named_parameters()}

    expected = gradients(zoo.workload(zoo.Stack))
    workload = zoo.workload(zoo.Stack)
    with swapping.swapped(workload.model, STACK, lanes):
        assert_same(gradients(workload), expected)


def test_two_forwards_before_one_backward(
    zoo: SimpleNamespace, swapping: SimpleNamespace, lanes: Lanes, assert_same: Check
) -> None:
    def gradients(workload: Workload) -> dict[str, Any]:
        torch.manual_seed(3)
        one, other = (workload.compute_loss(part) for part in workload.batch.split(2))
        (one + 2 * other).backward()
        return {n: p.grad for n, p in workload.model.named_parameters()}

    expected = gradients(zoo.workload(zoo.Stack))
    workload = zoo.workload(zoo.Stack)
    with swapping.swapped(workload.model, STACK, lanes):
        assert_same(gradients(workload), expected)


def test_a_graph_that_is_kept_can_be_walked_twice(
    zoo: SimpleNamespace, swapping: SimpleNamespace, lanes: Lanes, assert_same: Check
) -> None:
    def gradients(workload: Workload) -> dict[str, Any]:
        torch.manual_seed(3)
        loss = workload.compute_loss()
        loss.backward(retain_graph=True)
        loss.backward()
        return {n: p.grad for n, p in workload.model.named_parameters()}

    expected = gradients(zoo.workload(zoo.Stack))
    workload = zoo.workload(zoo.Stack)
    with swapping.swapped(workload.model, STACK, lanes) as at_work:
        assert_same(gradients(workload), expected)
        assert at_work.arena.used_bytes == 0


def test_gradients_of_gradients(
    zoo: SimpleNamespace, swapping: SimpleNamespace, lanes: Lanes, assert_same: Check
) -> None:
    def gradients(workload: Workload) -> list[Any]:
        torch.manual_seed(3)
        loss = workload.compute_loss()
        parameters = list(workload.model.parameters())
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        return [
            g.detach()
            for g in torch.autograd.grad(penalty, parameters, allow_unused=True)
            if g is not None
        ]

    expected = gradients(zoo.workload(zoo.Stack))
    workload = zoo.workload(zoo.Stack)
    with swapping.swapped(workload.model, STACK, lanes):
        assert_same(gradients(workload), expected)


def test_a_tensor_saved_in_two_versions_moves_twice(
    swapping: SimpleNamespace, lanes: Lanes, zoo: SimpleNamespace, assert_same: Check
) -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.randn(16)) for _ in range(2))
            self.unused: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            self.unused = y * self.first  # saves y, and is never walked back through
            y.mul_(2)
            return y * self.second

    class Net(zoo.Stack):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__(blocks=1)
            self.blocks = nn.ModuleList([Body()])

    def gradients(workload: Workload) -> dict[str, Any]:
        workload.compute_loss().backward()
        return {n: p.grad for n, p in workload.model.named_parameters() if p.grad is not None}

    expected = gradients(zoo.workload(Net))
    workload = zoo.workload(Net)
    moves = {0: CallMoves(None, 1, 1, 1)}
    with swapping.swapped(workload.model, ["blocks.0"], lanes, moves=moves) as at_work:
        assert_same(gradients(workload), expected)
        assert at_work.engine.statistics().moves == 2
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            workload.model.blocks[0].unused.sum().backward()
        workload.model.blocks[0].unused = None


def test_a_kept_tensor_that_was_changed_is_an_error_too(
    zoo: SimpleNamespace, swapping: SimpleNamespace
) -> None:
    """torch does not look at the versions of what hooks return."""

    class Net(zoo.Stack):  # type: ignore[name-defined]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.relu(self.stem(x))
            y = self.blocks[0](x)
            x.add_(1)
            return self.head(y)

    workload = zoo.workload(Net)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        workload.compute_loss().backward()
    for smallest in (1, 2**40):
        moves = swapping.everything(1, smallest=smallest)
        with swapping.swapped(workload.model, ["blocks.0"], moves=moves):
            loss = workload.compute_loss()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            del loss
