"""Convolutional models on a GPU: by layers where the host is short, else compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture import usual
from memfit.runtime.layout import prefers_channels_last
from memfit.workload import Workload


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + x)


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(6)))
        self.head = nn.Linear(width, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(image)).mean((2, 3)))


def _workload(width: int, images: int, size: int) -> Workload:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch).square().mean()

    torch.manual_seed(0)
    model = Net(width).cuda()
    batch = torch.randn(images, 3, size, size, device="cuda")
    return Workload(model, loss, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), batch)


def test_small_convolutions_are_launch_bound_and_large_ones_are_not() -> None:
    assert usual.is_launch_bound(_workload(16, 2, 16))
    assert not usual.is_launch_bound(_workload(256, 64, 112))


@pytest.mark.parametrize("launch_bound", [True, False])
def test_a_fit_holds_its_budget_in_that_layout(
    monkeypatch: pytest.MonkeyPatch, launch_bound: bool
) -> None:
    monkeypatch.setattr(usual, "is_launch_bound", lambda workload: launch_bound)
    workload = _workload(64, 32, 56)
    assert prefers_channels_last(workload)
    fitted = memfit.fit_workload(workload, "75%", steps=3, allow="recompute")
    result, plan = fitted.result, fitted.plan
    fitted.undo()
    assert plan.channels_last
    assert plan.executor == ("module" if launch_bound else "inductor")
    assert result.measured.peak_reserved_bytes <= result.budget_bytes
    assert result.measured.retries == 0
    assert abs(result.peak_error) < 0.03
    assert result.numerics.agree
    if launch_bound:
        assert result.numerics.bitwise_vs_unplanned
