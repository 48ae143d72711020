"""An optimizer like the workload's, for parameters that a system put in the place of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from memfit.bench.systems.prepared import Step, Unavailable
from memfit.workload import Workload

Groups = list[dict[str, Any]]


def group_names(workload: Workload) -> Groups:
    """The optimizer's groups with names for parameters, to be filled by `with_parameters`."""
    names = {p: name for name, p in workload.model.named_parameters()}
    groups = []
    for group in workload.optimizer.param_groups:
        unknown = [p for p in group["params"] if p not in names]
        if unknown:
            raise Unavailable("the optimizer has parameters that are not the model's")
        groups.append({**group, "params": [names[p] for p in group["params"]]})
    return groups


def with_parameters(groups: Groups, model: torch.nn.Module) -> Groups:
    """The groups with the parameters that have these names now."""
    now = dict(model.named_parameters())
    return [{**group, "params": [now[name] for name in group["params"]]} for group in groups]


def optimizer_options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The options to make another optimizer of this class with."""
    known = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in known}


def only_known(groups: Groups, options: dict[str, Any]) -> Groups:
    """The groups without what the optimizer's constructor does not take."""
    return [{k: v for k, v in g.items() if k == "params" or k in options} for g in groups]


def step_of(
    workload: Workload,
    model: torch.nn.Module,
    optimizer: Any,
    backward: Callable[[torch.Tensor], None] | None = None,
) -> Step:
    """Forward, backward, optimizer and no gradients left, as `run_step` does."""
    loss_fn, batch = workload.loss_fn, workload.batch

    def step() -> None:
        loss = loss_fn(model, batch)
        loss.backward() if backward is None else backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def refuse_scaler(workload: Workload, system: str) -> None:
    """Unavailable for steps with a GradScaler."""
    if workload.scaler is not None:
        raise Unavailable(f"{system} is not run with a GradScaler here: use fp32 or bf16")


def refuse_other_gpus(device: torch.device, system: str) -> None:
    """Unavailable on any GPU but the first: rank 0 takes that one."""
    if device.type == "cuda" and device.index:
        raise Unavailable(f"{system} runs on the first GPU only: set CUDA_VISIBLE_DEVICES")
