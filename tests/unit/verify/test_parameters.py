"""Parameters after steps of another optimizer: what is wrong is noticed, noise is not."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memfit.ir.result import Numerics
from memfit.verify.parameters import FEW, check_parameters
from memfit.workload import Workload


class Changed:
    """Something at work that changes the optimizer's only group, time and again."""

    def __init__(self, workload: Workload, **changes: Any) -> None:
        self.group, self.changes = workload.optimizer.param_groups[0], changes

    def __enter__(self) -> None:
        self.before = {name: self.group[name] for name in self.changes}
        self.group.update(self.changes)

    def __exit__(self, *_: object) -> None:
        self.group.update(self.before)


def hotter(workload: Workload, factor: float) -> Any:
    """The learning rate times a factor."""
    return Changed(workload, lr=factor * workload.optimizer.param_groups[0]["lr"])


def without(workload: Workload, name: str) -> Any:
    """A parameter is not stepped."""
    left_out = workload.model.get_parameter(name)
    parameters = workload.optimizer.param_groups[0]["params"]
    return Changed(workload, params=[p for p in parameters if p is not left_out])


def noisy(workload: Workload, share: float, seed: int = 0) -> Workload:
    """The workload with gradients that are other ones each time, as kernels on a GPU make them."""
    loss_fn, numbers = workload.loss_fn, torch.Generator().manual_seed(seed)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        total = loss_fn(model, batch)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=numbers)
            total = total + share * (parameter * noise).sum() / parameter.numel() ** 0.5
        return total

    workload.loss_fn = loss
    return workload


def test_another_optimizer_step_is_noticed(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    same, other = hotter(workload, 1.0), hotter(workload, 2.0)
    assert check_parameters(workload, same, same).bitwise_vs_unplanned
    found = check_parameters(workload, other, same)
    assert not found.agree and found.repeatable and found.note is None


def test_steps_that_do_not_repeat_themselves_are_their_own_measure(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    loss_fn, runs = workload.loss_fn, itertools.count()
    flips = (1.0, 1.0, -1.0, 1.0, -1.0, 1.0)  # two steps of each run, signs that Adam will follow
    workload.loss_fn = lambda *given: loss_fn(*given) * flips[next(runs)]
    same = hotter(workload, 1.0)
    found = check_parameters(workload, same, same)
    assert found.agree and not found.repeatable and not found.bitwise_vs_unplanned
    assert "plain steps do not repeat themselves" in str(found.note)


NOISE = 1e-3  # an update of Adam then comes out about a tenth of its length elsewhere


def _compared(zoo: SimpleNamespace, planned: Any, seed: int = 0) -> Numerics:
    workload = noisy(zoo.workload(lambda: zoo.Stack(dropout=0.0)), NOISE, seed)
    return check_parameters(workload, planned(workload), hotter(workload, 1.0))


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_difference(zoo: SimpleNamespace, seed: int) -> None:
    found = _compared(zoo, lambda workload: hotter(workload, 1.0), seed)
    assert found.agree and not found.repeatable
    assert found.grad_max_rel_diff > 0.01, "single numbers are far apart"


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
def test_other_steps_are_noticed_in_spite_of_noise(zoo: SimpleNamespace, factor: float) -> None:
    found = _compared(zoo, lambda workload: hotter(workload, factor))
    assert not found.agree


@pytest.mark.parametrize("name", ["stem.weight", "blocks.2.norm.weight", "head.weight"])
def test_a_parameter_that_is_left_out_is_noticed_in_spite_of_noise(
    zoo: SimpleNamespace, name: str
) -> None:
    found = _compared(zoo, lambda workload: without(workload, name))
    assert not found.agree and name in str(found.note)


class Gated(nn.Module):
    """A gate that changes nothing: its gradient is noise alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(8, 8), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + 0.0 * self.gate


@pytest.mark.parametrize("seed", range(8))
def test_a_few_numbers_that_flip_by_chance_are_no_difference(
    zoo: SimpleNamespace, seed: int
) -> None:
    workload = noisy(zoo.workload(Gated), NOISE, seed)
    assert workload.model.gate.numel() < FEW
    same = hotter(workload, 1.0)
    assert check_parameters(workload, same, same).agree
