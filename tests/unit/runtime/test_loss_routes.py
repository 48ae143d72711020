"""When a step's forward begins and ends for an engine whose last segments are losses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memfit.ir.step_graph import LOSS
from memfit.runtime.calls import Direct, Route, routed

LABELS = torch.zeros(24, dtype=torch.int64)


class _Written(Direct):
    """Writes down what it is told, in order."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def begin(self) -> None:
        self.seen.append("begin")

    def end(self) -> None:
        self.seen.append("end")

    def __call__(self, index: int, forward: Any, args: Any, kwargs: Any) -> Any:
        self.seen.append(index)
        return forward(*args, **kwargs)


def _loss(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), LABELS)


class Judging(nn.Module):
    """Computes its own loss."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _loss(self.stack(x))


def _calls(model: nn.Module, route: Route, step: Any) -> list[Any]:
    engine = _Written()
    with routed(model, route, engine):
        step()
        seen = list(engine.seen)
    return seen


@pytest.fixture
def stack(zoo: SimpleNamespace) -> nn.Module:
    return zoo.Stack(blocks=1)


def test_a_step_ends_after_the_loss_that_follows_the_model(
    stack: nn.Module, zoo: SimpleNamespace
) -> None:
    route = Route([("blocks.0", 0, 1), (LOSS, 0, 1)])
    seen = _calls(stack, route, lambda: _loss(stack(zoo.sequences())))
    assert seen == ["begin", 0, 1, "end"]


def test_a_step_ends_with_the_model_that_computes_its_loss(
    stack: nn.Module, zoo: SimpleNamespace
) -> None:
    model = Judging(stack)
    route = Route([("stack.blocks.0", 0, 1), (LOSS, 0, 1)])
    seen = _calls(model, route, lambda: model(zoo.sequences()))
    assert seen == ["begin", 0, 1, "end"]


def test_a_step_of_two_calls_ends_after_the_second_loss(
    stack: nn.Module, zoo: SimpleNamespace
) -> None:
    def step() -> None:
        for _ in range(2):
            _loss(stack(zoo.sequences()))

    calls = [("blocks.0", 0, 2), (LOSS, 0, 2), ("blocks.0", 1, 2), (LOSS, 1, 2)]
    assert _calls(stack, Route(calls, model_calls=2), step) == ["begin", 0, 1, 2, 3, "end"]


def test_losses_beyond_the_step_are_none_of_its_segments(
    stack: nn.Module, zoo: SimpleNamespace
) -> None:
    def step() -> None:
        _loss(torch.randn(4, 6, 3, requires_grad=True))  # before it
        _loss(stack(zoo.sequences()))
        _loss(torch.randn(4, 6, 3, requires_grad=True))  # after it
        with torch.no_grad():
            stack(zoo.sequences())
        _loss(torch.randn(4, 6, 3, requires_grad=True))  # after a forward that wants no gradient

    route = Route([("blocks.0", 0, 1), (LOSS, 0, 1)])
    assert _calls(stack, route, step) == ["begin", 0, 1, "end", "begin", 0, "end"]


def test_a_step_whose_loss_fails_leaves_the_next_one_whole(
    stack: nn.Module, zoo: SimpleNamespace
) -> None:
    def step() -> None:
        with pytest.raises(ValueError, match="batch_size"):
            F.cross_entropy(stack(zoo.sequences()).flatten(0, 1), LABELS[:3])
        _loss(stack(zoo.sequences()))

    route = Route([("blocks.0", 0, 1), (LOSS, 0, 1)])
    assert _calls(stack, route, step) == ["begin", 0, 1, "begin", 0, 1, "end"]
