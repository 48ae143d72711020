"""Steps launched as CUDA graphs: the same numbers, the budget, memory given back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.measure.cuda_allocator import prefer_expandable_segments
from memfit.runtime.cuda_graphs import Cuda, CudaGraphs

DEVICE = torch.device("cuda")
RATE = 0.01


class Block(nn.Module):
    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inputs, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.two = nn.Conv2d(channels, inputs, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + self.two(torch.relu(self.norm(self.one(images))))


class ConvNet(nn.Module):
    def __init__(self, blocks: int = 12, channels: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Block(channels, channels) for _ in range(blocks))
        self.head = nn.Linear(channels, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = self.stem(images)
        for block in self.blocks:
            images = block(images)
        return self.head(images.mean((2, 3)))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch_of(seed: int, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    images = torch.randn(size, 3, 32, 32, device=DEVICE, generator=generator)
    return images, torch.randint(10, (size,), device=DEVICE, generator=generator)


def test_steps_are_the_same_bit_for_bit() -> None:
    prefer_expandable_segments(DEVICE)  # as the fits do that come after
    torch.manual_seed(0)
    plain = ConvNet().to(DEVICE)
    model = copy.deepcopy(plain)
    graphs = CudaGraphs(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (plain, model)]
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        for number in range(4):
            for part in range(2):  # gradients add up
                batch = batch_of(2 * number + part)
                expected = loss_of(plain, batch)
                expected.backward()
                with graphs.at_work(lambda: None):
                    loss = loss_of(model, batch)
                    loss.backward()
                assert torch.equal(expected, loss), number
            for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                assert torch.equal(one.grad, other.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for one, other in zip(plain.buffers(), model.buffers(), strict=True):
            assert torch.equal(one, other)
    finally:
        torch.backends.cudnn.deterministic = before
    assert graphs.refused is None and graphs.replays == 7
    hidden = graphs.hidden_bytes
    assert hidden > 2**20
    del loss, expected
    held = torch.cuda.memory_reserved()
    graphs.release()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < held - hidden


@pytest.mark.parametrize("executor", ["module", "inductor"])
def test_a_fit_holds_its_budget_as_graphs(executor: str) -> None:
    torch.manual_seed(0)
    model = ConvNet().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    workload = memfit.Workload(model, loss_of, optimizer, batch_of(0))
    fitted = memfit.fit_workload(workload, "75%", executor=executor, cuda_graphs=True)
    result = fitted.result
    assert result.plan_s >= 0 and fitted.plan.cuda_graphs
    assert fitted.plan.recomputed_bytes > 0
    assert fitted.applied.graphs is not None and fitted.applied.graphs.refused is None
    assert result.measured.peak_reserved_bytes <= result.budget_bytes
    assert result.numerics.agree, result.numerics
    off = result.measured.peak_bytes / result.predicted.peak_bytes - 1
    assert abs(off) < 0.05, off
    plain = copy.deepcopy(model)
    other = torch.optim.SGD(plain.parameters(), RATE, momentum=0.9)
    for seed in range(12):
        loss = fitted.step(batch_of(seed % 2))
        other.zero_grad()
        expected = loss_of(plain, batch_of(seed % 2))
        expected.backward()
        other.step()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=0.02, atol=0)
    assert fitted.applied.graphs.replays >= 10
    fitted.undo()


def test_a_capture_that_is_broken_off_leaves_nothing_behind() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1024, 1024)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            return x * (2.0 if float(x.detach().sum()) > 0 else 1.0)

    model = Asking().to(DEVICE)
    batch = torch.randn(4096, 1024, device=DEVICE)
    graphs = CudaGraphs(model)
    # The scratch of cuBLAS, which a step takes anew, is 32 MiB on two threads each, in whole pages.
    Cuda().clear(DEVICE)
    reserved = torch.cuda.memory_reserved()
    with graphs.at_work(lambda: None):
        for _ in range(3):
            model(batch).sum().backward()
            model.zero_grad()
    assert graphs.refused is not None and graphs.replays == 0
    assert torch.isfinite(torch.randn(8, device=DEVICE)).all()
    Cuda().clear(DEVICE)
    assert torch.cuda.memory_reserved() <= reserved + 2**22  # a layer's output alone is 2**24
    convolutions = ConvNet().to(DEVICE)
    graphs = CudaGraphs(convolutions)
    with graphs.at_work(lambda: None):
        for seed in range(3):
            loss_of(convolutions, batch_of(seed)).backward()
    assert graphs.refused is None and graphs.replays == 2


def test_gradients_that_a_loop_keeps_stay_as_they_were() -> None:
    model = ConvNet().to(DEVICE)
    graphs = CudaGraphs(model)
    kept = []
    with graphs.at_work(lambda: None):
        for seed in range(8):
            loss_of(model, batch_of(seed)).backward()
            if seed in (2, 5):
                kept.append((model.head.weight.grad, model.head.weight.grad.clone()))
            model.zero_grad()
    assert graphs.refused is None and graphs.replays == 5
    for gradient, copied in kept:
        assert torch.equal(gradient, copied)
