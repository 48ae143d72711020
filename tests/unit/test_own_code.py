"""What users' own code does in and around blocks: numbers are those of the plain step, or it says.

Hooks, changes in place between modules, random numbers of Python and numpy, sizes that hang on
random numbers, counters, scripted modules, schedulers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import memfit
from memfit.measure.host_random import host_state
from memfit.runtime.compile import backend
from memfit.runtime.compile.choice import OtherGraph
from memfit.runtime.same_forward import SameForward
from memfit.workload import Workload

WIDTH, ROWS = 32, 256
Build = Callable[[], nn.Module]


class Block(nn.Module):
    """A residual block; `odd` is what its kinds do to the hidden values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.odd(self.up(x))))


class DrawsFromPython(Block):
    def odd(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.random()


class DrawsFromNumpy(Block):
    def odd(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(np.random.rand())


class Counts(Block):
    """Every call does something else."""

    calls = 0

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1 + self.calls)


class Alone(Block):
    """With a forward of its own, which no other test has compiled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sigmoid(self.up(x)))


class Routed(Block):
    """As many rows as dropped values say go through it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (nn.functional.dropout(x, 0.5).sum(-1) > 0).nonzero().squeeze(-1)
        return x.index_add(0, rows, super().forward(x[rows]))


class AddsInPlace(nn.Module):
    """The shortcut is added in place, between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return x


def stack(kind: Callable[[], nn.Module] = Block, blocks: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), *(kind() for _ in range(blocks)), nn.Linear(WIDTH, 4))


def workload(model: nn.Module) -> Workload:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    return Workload(model, lambda m, x: m(x).square().mean(), optimizer, torch.randn(ROWS, 8))


def gradients(step: Workload) -> list[torch.Tensor]:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    step.compute_loss().backward()
    found = [p.grad.clone() for p in step.model.parameters() if p.grad is not None]
    step.model.zero_grad()
    return found


def assert_planned_as_plain(step: Workload, **options: Any) -> memfit.Fitted:
    """Gradients are those of the plain step: bit for bit, by captured graphs but for rounding."""
    plain = gradients(step)
    rounding = 0.0 if options.get("executor") == "module" else 1e-5
    with memfit.fit_workload(step, 10**9, steps=1, **options) as fitted:
        assert fitted.result.numerics.bitwise_vs_unplanned
        for one, other in zip(plain, gradients(step), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=rounding * float(one.abs().max()))
        return fitted


@pytest.mark.parametrize("where", [1, 3])
@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_inside_of_one_block_is_that_blocks_alone(where: int, hook: str) -> None:
    step = workload(stack())
    doubled = {
        "register_forward_hook": lambda module, given, made: 2 * made,
        "register_forward_pre_hook": lambda module, given: (2 * given[0],),
    }
    getattr(step.model[where].up, hook)(doubled[hook])
    fitted = assert_planned_as_plain(step, strategy="all", executor="graph")
    assert fitted.result.numerics.eager_max_rel_diff == 0


def test_a_hook_that_comes_after_the_plan_is_refused() -> None:
    step = workload(stack())
    with memfit.fit_workload(step, 10**9, steps=1, strategy="none", executor="graph"):
        step.compute_loss()
        step.model[2].up.register_forward_hook(lambda module, given, made: 2 * made)
        with pytest.raises(OtherGraph, match="no longer runs the operators"):
            step.compute_loss()


@pytest.mark.parametrize("executor", ["module", "graph"])
@pytest.mark.parametrize("strategy", ["all", "interval", "optimal"])
def test_what_is_changed_in_place_between_blocks_is_not_made_anew(
    executor: str, strategy: str
) -> None:
    model = nn.Sequential(nn.Linear(8, WIDTH), AddsInPlace(), nn.Linear(WIDTH, 4))
    interval = 3 if strategy == "interval" else None
    assert_planned_as_plain(
        workload(model), strategy=strategy, executor=executor, interval=interval
    )


@pytest.mark.parametrize("kind", [DrawsFromPython, DrawsFromNumpy, Routed])
@pytest.mark.parametrize("executor", ["module", "graph"])
def test_random_numbers_of_every_kind_are_drawn_again(
    kind: Callable[[], nn.Module], executor: str
) -> None:
    step = workload(stack(kind))
    before = host_state()
    profile = memfit.profile(step, executor=executor)
    assert host_state() == before and len(profile.graph.calls) > 3
    fitted = assert_planned_as_plain(step, strategy="all", executor=executor)
    assert fitted.result.numerics.repeatable and fitted.result.numerics.agree


@pytest.mark.parametrize("executor", ["module", "graph"])
def test_what_blocks_count_is_counted_once(executor: str) -> None:
    plain, step = workload(stack(Counts)), workload(stack(Counts))
    fitted = memfit.fit_workload(step, 10**9, steps=1, strategy="all", executor=executor)
    assert [block.calls for block in step.model[1:-1]] == [0] * 4
    assert fitted.result.numerics.bitwise_vs_unplanned
    uncaptured = memfit.profile(workload(stack(Counts)), executor="graph").uncaptured
    assert uncaptured["1"] == "Counts: its forward changes calls, a number of a Counts"
    for _ in range(3):
        plain.compute_loss().backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
        fitted.step(step.batch)
    assert [block.calls for block in step.model[1:-1]] == [3] * 4
    for one, other in zip(plain.model.parameters(), step.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_second_forward_counts_once() -> None:
    model, given = stack(Counts), torch.randn(ROWS, 8)
    same = SameForward(model, torch.device("cpu"))
    first = model(given)
    with same.again():
        assert torch.equal(model(given), first)
    assert [block.calls for block in model[1:-1]] == [1] * 4
    assert not torch.equal(model(given), first)


def test_a_scripted_module_is_left_as_it_was() -> None:
    model = stack()
    model[2] = torch.jit.script(model[2])
    step = workload(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert_planned_as_plain(step, strategy="all")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_scheduler_may_be_there_before_the_fit() -> None:
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = StepLR(optimizer, 1)
    step = Workload(model, lambda m, x: m(x).square().mean(), optimizer, torch.randn(8, 8))
    with memfit.fit_workload(step, "90%", steps=1) as fitted:
        fitted.step(step.batch, scheduler=scheduler)
        fitted.step(torch.randn(12, 8), scheduler=scheduler)  # planned again
    assert scheduler.get_last_lr() == pytest.approx([1e-5])


def test_numbers_that_differ_are_said_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a block runs by the code of another one, which has no hook."""
    for settings in (backend._STATIC_SETTINGS, backend._SYMBOLIC_SETTINGS):
        monkeypatch.setitem(settings, "skip_nnmodule_hook_guards", True)
    step = workload(stack(Alone))
    step.model[3].up.register_forward_hook(lambda module, given, made: 2 * made)
    with (
        pytest.warns(UserWarning, match="its numbers are not those of the plain step"),
        memfit.fit_workload(step, 10**9, steps=1, strategy="all", executor="graph") as fitted,
    ):
        assert not fitted.result.numerics.kept and fitted.result.verdict != "fits"
        assert "is not the plain step" in (fitted.result.numerics.note or "")
