"""Modules whose saved tensors nobody else sees: in checkpoints of the user's own, under no_grad."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.capture.find import find_segments
from memfit.errors import ModelError
from memfit.workload import Workload


def _checkpointing(zoo: SimpleNamespace, reentrant: bool) -> Workload:
    class Net(zoo.Stack):  # type: ignore[name-defined]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x)

    return zoo.workload(Net)


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_in_checkpoints_of_the_users_own_are_left_alone(
    zoo: SimpleNamespace, reentrant: bool
) -> None:
    """What they saved was looked for and not found: KeyError."""
    workload = _checkpointing(zoo, reentrant)
    segments, _ = find_segments(workload)
    assert [s.visit.module for s in segments] == ["stem", "head"]
    with memfit.fit_workload(workload, "100%", executor="graph", steps=1) as fitted:
        assert fitted.result.numerics.bitwise_vs_unplanned
        assert abs(fitted.result.peak_error) <= 0.03


def test_a_teacher_under_no_grad_is_left_alone(zoo: SimpleNamespace) -> None:
    model = nn.ModuleDict({"student": zoo.Stack(), "teacher": zoo.Stack().requires_grad_(False)})

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = model["teacher"](batch)
        return (model["student"](batch) - wanted).square().mean()

    segments, _ = find_segments(zoo.workload(lambda: model, loss=loss))
    assert {s.visit.module.partition(".")[0] for s in segments} == {"student"}


def test_a_step_in_hooks_of_the_users_own_is_refused(zoo: SimpleNamespace) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(batch).square().mean()

    with pytest.raises(ModelError, match="hooks on saved tensors") as raised:
        find_segments(zoo.workload(zoo.Stack, loss=loss))
    assert raised.value.hint is not None


def test_a_gradient_penalty_is_refused(zoo: SimpleNamespace) -> None:
    """A backward inside the forward met an assertion of ours."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.clone().requires_grad_()
        plain = model(batch).square().mean()
        (gradient,) = torch.autograd.grad(plain, batch, create_graph=True)
        return plain + gradient.square().mean()

    with pytest.raises(ModelError, match="a backward of its own") as raised:
        memfit.profile(zoo.workload(zoo.Stack, loss=loss), executor="module")
    assert "memfit.pressure" in str(raised.value.hint)


def test_a_plain_step_that_only_fails_without_recomputing_is_explained(
    zoo: SimpleNamespace,
) -> None:
    """torch refuses what this changes in place, but not where it is recomputed: a traceback."""

    class Layer(zoo.Block):  # type: ignore[name-defined]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.up(self.norm(x)).relu_().mul_(2))

    class Net(zoo.Stack):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__(blocks=1)
            self.blocks = nn.ModuleList(Layer() for _ in range(3))

    with pytest.raises(ModelError, match="modified by an inplace operation"):
        memfit.profile(zoo.workload(Net), executor="module")


def test_a_graph_that_a_block_drops_in_its_forward(zoo: SimpleNamespace) -> None:
    """A straight-through estimator: nobody held what was saved before the detach(), TypeError."""

    class Layer(zoo.Block):  # type: ignore[name-defined]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + (torch.tanh(self.up(x)).mean() - 1).exp().detach()

    class Net(zoo.Stack):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__(blocks=1)
            self.blocks = nn.ModuleList(Layer() for _ in range(3))

    workload = zoo.workload(Net, lambda: zoo.sequences(256))
    with memfit.fit_workload(workload, "80%", executor="module", steps=1) as fitted:
        assert fitted.result.numerics.bitwise_vs_unplanned
        assert abs(fitted.result.peak_error) <= 0.03
