"""Which optimizers and groups of parameters can be stepped part by part."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from memfit.errors import UsageError

Parameters = Sequence[torch.nn.Parameter]
# Each of these treats every parameter by itself, so that parts give the numbers of the whole.
_SEPARABLE = (
    "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop SGD".split()
)


def own_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """The step of the optimizer's class, without the hooks that torch calls around it."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def check_separable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step cannot be done part by part.

    A class that memfit does not know vouches for itself by an attribute `separable` that is True.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{name} evaluates the loss several times in a step and needs all gradients at once, "
            "so it cannot step part by part",
            hint="use an optimizer that steps once per backward, for example torch.optim.AdamW",
        )
    if getattr(optimizer, "separable", False) is True:
        return
    known = {inspect.unwrap(getattr(torch.optim, k).step) for k in _SEPARABLE}
    if inspect.unwrap(type(optimizer).step) not in known:
        raise UsageError(
            f"memfit does not know whether {name} treats each parameter by itself, "
            "so stepping part by part might change its numbers",
            hint=f"use one of torch.optim's {', '.join(_SEPARABLE)}; or, if no parameter's update "
            f"depends on another parameter, give the class an attribute: {name}.separable = True",
        )


def refuse_sparse(parameter: torch.Tensor) -> None:
    """Refuse a gradient that is not an ordinary tensor."""
    gradient = parameter.grad
    if gradient is not None and gradient.layout is not torch.strided:
        raise UsageError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, "
            "which the planned optimizer step cannot use",
            hint="build the embedding with sparse=False",
        )


def optimized(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """The optimizer's parameters, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def checked_groups(
    optimizer: torch.optim.Optimizer, groups: Iterable[Parameters]
) -> list[list[torch.nn.Parameter]]:
    """The groups without empty ones; UsageError unless they are disjoint and the optimizer's."""
    free = {id(p) for p in optimized(optimizer)}
    known = set(free)
    checked = [list(group) for group in groups]
    for parameter in (p for group in checked for p in group):
        if id(parameter) not in free:
            what = "stands twice in the groups" if id(parameter) in known else "is not optimized"
            raise UsageError(
                f"a parameter of shape {tuple(parameter.shape)} {what}",
                hint="give each parameter of the optimizer in at most one group",
            )
        free.discard(id(parameter))
    return [group for group in checked if group]
