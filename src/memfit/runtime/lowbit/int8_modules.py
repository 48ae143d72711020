"""Which modules of a model can have their weights in int8."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from memfit.errors import UsageError

_KINDS = (
    torch.nn.Linear,
    torch.nn.Embedding,
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
)
_HINT = 'give names such as names=["layers.*"] of Linear, Embedding or Conv modules'


def channel_axis(module: torch.nn.Module) -> int:
    """The axis of a weight along which its output channels or rows lie."""
    return 1 if _is_transposed_linear(module) else 0


def find_modules(
    model: torch.nn.Module, names: Iterable[str] | None, forward_only: bool
) -> dict[str, torch.nn.Module]:
    """The modules to take by name; `names` may hold patterns, None: all that can be taken.

    Without `forward_only`, only frozen weights can.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    why_not = {name: _why_not(module, forward_only) for name, module in modules.items()}
    able = [name for name, reason in why_not.items() if reason is None]
    read_elsewhere = _read_by_others(modules, able)
    for name in able:
        if id(modules[name].weight) in read_elsewhere:
            why_not[name] = "shares its weight with a module that cannot have it in int8"
    if names is not None:
        return _with_sharers(modules, _chosen(names, why_not))
    able = [name for name in able if why_not[name] is None]
    if not able:
        raise UsageError("the model has no frozen Linear, Embedding or Conv module", hint=_HINT)
    return {name: modules[name] for name in able}


def _chosen(names: Iterable[str], why_not: dict[str, str | None]) -> list[str]:
    chosen: list[str] = []
    for pattern in names:
        matching = [name for name in why_not if fnmatchcase(name, pattern)]
        able = [name for name in matching if why_not[name] is None]
        if not able:
            reason = f"{matching[0]!r} {why_not[matching[0]]}" if matching else "there is none"
            raise UsageError(f"no module {pattern!r} can have int8 weights: {reason}", hint=_HINT)
        chosen += able
    return list(dict.fromkeys(chosen))


def _why_not(module: torch.nn.Module, forward_only: bool) -> str | None:
    weight = module._parameters.get("weight")
    if not (isinstance(module, _KINDS) or _is_transposed_linear(module)):
        return "is no Linear, Embedding or Conv module"
    if weight is None or isinstance(weight, torch.nn.UninitializedParameter):
        return "has no weight of its own"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "is read by its attention without being called"
    if isinstance(module, torch.nn.Embedding) and module.max_norm is not None:
        return "changes its weight in forward (max_norm)"
    if weight.requires_grad and not forward_only:
        return "is trained: freeze it with requires_grad_(False)"
    return None


def _read_by_others(modules: dict[str, torch.nn.Module], able: list[str]) -> set[int]:
    """The ids of parameters that are not, or not only, weights of these modules."""
    taken = {id(modules[name]) for name in able}
    return {
        id(parameter)
        for module in modules.values()
        for key, parameter in module._parameters.items()
        if parameter is not None and (id(module) not in taken or key != "weight")
    }


def _with_sharers(
    modules: dict[str, torch.nn.Module], chosen: list[str]
) -> dict[str, torch.nn.Module]:
    """The chosen modules, and those that share their weights."""
    weights = {id(modules[name].weight) for name in chosen}
    return {
        name: module
        for name, module in modules.items()
        if id(module._parameters.get("weight")) in weights
    }


def _is_transposed_linear(module: torch.nn.Module) -> bool:
    """Whether it is the linear layer of GPT-2 in transformers, which is not imported here."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
