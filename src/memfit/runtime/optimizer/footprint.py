"""What the techniques of the optimizer save and hold, in bytes."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.runtime.optimizer.accepted import Parameters
from memfit.runtime.optimizer.parts import Parts
from memfit.runtime.swap.arena import GRAIN

_PLAIN = {"fused": False, "foreach": False, "capturable": False, "lr": 0.0}


@dataclass(frozen=True)
class Footprint:
    """Bytes of a technique.

    `removed_bytes` no longer lie on the device from step to step, or through backward;
    `working_bytes` of them come back at a time; `host_bytes` are taken in host memory.
    """

    removed_bytes: int
    working_bytes: int
    host_bytes: int

    @property
    def saved_bytes(self) -> int:
        """What the device's peak can lose."""
        return self.removed_bytes - self.working_bytes


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def rounded(size: int) -> int:
    """A size as the arena counts it."""
    return max(1, math.ceil(size / GRAIN)) * GRAIN


def movable(state: dict[Any, Any]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of one parameter's state that are worth moving: all but single numbers."""
    return [(k, t) for k, t in state.items() if type(t) is torch.Tensor and t.numel() > 1]


class StateSizes:
    """How many bytes the state of a parameter takes, known before it exists."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._found: dict[Any, int] = {}

    def of(self, parameters: Parameters) -> int:
        """Bytes of the movable state of these parameters, each tensor rounded as in the arena."""
        return sum(self._one(p) for p in parameters if p.requires_grad)

    def _one(self, parameter: torch.nn.Parameter) -> int:
        state = self._parts.optimizer.state.get(parameter)
        if state:
            return _movable_bytes(state)
        key = (id(self._parts.group(parameter)), parameter.shape, parameter.dtype)
        if key not in self._found:
            self._found[key] = self._tried(parameter)
        return self._found[key]

    def _tried(self, parameter: torch.nn.Parameter) -> int:
        """Step a parameter without memory, and look at the state that it gets."""
        shadow = torch.nn.Parameter(torch.empty_like(parameter, device="meta"))
        shadow.grad = torch.empty_like(shadow)
        part = self._parts.part([parameter], {id(parameter): shadow}, **_PLAIN)
        part.state = defaultdict(dict)
        try:
            self._parts.run(part)
        except (RuntimeError, NotImplementedError) as error:
            raise UsageError(
                f"the state of {type(part).__name__} is not known before its first step: {error}",
                hint="run one training step before asking for its size",
            ) from error
        return _movable_bytes(part.state[shadow])


def _movable_bytes(state: dict[Any, Any]) -> int:
    return sum(rounded(tensor_bytes(t)) for _, t in movable(state))
