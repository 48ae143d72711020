"""What a model's forward does beside computing its output, as far as it can be seen from outside.

A forward that is launched as a graph runs none of its Python again. So one that draws random
numbers, or that sets attributes of its modules (a counter, a list of losses), must not be. What it
prints, or keeps in a global variable, cannot be seen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memfit.runtime.random_state import RandomState

_SIMPLE = (bool, int, float, complex, str, bytes, type(None))
_TORCH_OWN = ("_parameters", "_buffers", "_modules")  # tensors, which a graph writes as well


@dataclass(frozen=True)
class Traces:
    """Random generators and attributes at one time."""

    device: torch.device
    modules: Sequence[torch.nn.Module]
    generators: RandomState
    others: tuple[Any, ...]
    attributes: list[dict[str, Any]]

    @staticmethod
    def of(modules: Sequence[torch.nn.Module], device: torch.device) -> Traces:
        """Those of now."""
        attributes = [{n: _seen(v) for n, v in _own(m).items()} for m in modules]
        return Traces(device, modules, RandomState.of([device]), _generators(), attributes)

    def left_since(self) -> str | None:
        """What has changed by now; None where nothing has."""
        drawn = not self.generators.same_as(RandomState.of([self.device]))
        if drawn or self.others != _generators():
            return "its forward draws random numbers"
        for module, before in zip(self.modules, self.attributes, strict=True):
            now = _own(module)
            for name in before.keys() | now.keys():
                if name not in before or name not in now or before[name] != _seen(now[name]):
                    return f"its forward changes the attribute {name} of a {type(module).__name__}"
        return None


def _generators() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state(legacy=True)
    return random.getstate(), tuple(
        part.tobytes() if hasattr(part, "tobytes") else part for part in numpy
    )


def _own(module: torch.nn.Module) -> dict[str, Any]:
    return {n: v for n, v in vars(module).items() if n not in _TORCH_OWN}


def _seen(value: Any) -> Any:
    """What is equal later if the value stayed the same: of containers their items, one by one."""
    if isinstance(value, _SIMPLE):
        return type(value), repr(value)  # nan is not equal to itself
    if isinstance(value, dict):
        return id(value), tuple((_item(k), _item(v)) for k, v in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return id(value), tuple(map(_item, value))
    return id(value)


def _item(value: Any) -> Any:
    return repr(value) if isinstance(value, _SIMPLE) else id(value)
