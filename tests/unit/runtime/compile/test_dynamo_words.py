"""What dynamo says on the terminal: nothing of limits that memfit lifts, all of the user's own."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from memfit.runtime.compile.compiled import CompiledSegments


class Kept(logging.Handler):
    """What would have been written."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def segments() -> Iterator[CompiledSegments]:
    made = CompiledSegments("graph")
    yield made
    made.close()


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Warnings of dynamo."""
    log, kept = logging.getLogger("torch._dynamo"), Kept()
    log.addHandler(kept)
    yield kept.messages
    log.removeHandler(kept)


class Scaled(nn.Linear):
    """Layers of one class that differ in a number are compiled one by one."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


def test_limits_that_are_lifted_are_not_spoken_of(
    segments: CompiledSegments, said: list[str]
) -> None:
    """A layer that ran is called without memfit's settings: past eight, dynamo warned."""
    layers = [Scaled(4, 4) for _ in range(10)]
    for factor in (1.0, 2.0):
        for number, layer in enumerate(layers):
            layer.factor = factor + number / 16
            segments(layer.forward, (torch.ones(2, 4, requires_grad=True),), {})
    assert segments.compilations == 20
    assert said == []


def test_limits_of_the_user_s_own_code_are(segments: CompiledSegments, said: list[str]) -> None:
    segments(nn.Linear(4, 4).forward, (torch.ones(2, 4, requires_grad=True),), {})
    compiled = torch.compile(lambda layer, x: layer(x), backend="eager", dynamic=False)
    for number in range(10):
        layer = Scaled(4, 4)
        layer.factor = number / 16
        compiled(layer, torch.ones(2, 4))
    assert any("recompile_limit" in message for message in said)
