"""A whole step's model and loss compiled as one by torch.compile, without a plan."""

from __future__ import annotations

from dataclasses import replace
from types import FunctionType
from typing import Any

import torch

from memfit.workload import Workload


def compiled_whole(workload: Workload, mode: str | None = None) -> Workload:
    """The same workload with loss and model compiled as one when it first runs."""

    def loss(batch: Any) -> torch.Tensor:
        return workload.loss_fn(workload.model, batch)

    compiled: Any = torch.compile(own_code(loss), dynamic=False, mode=mode)
    return replace(workload, loss_fn=lambda model, batch: compiled(batch))


def own_code(function: Any) -> Any:
    """The function with a code object of its own: dynamo keeps compiled code by code object."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{id(object())}")
    return FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)
