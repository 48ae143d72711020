"""The cross-entropy of a step as a module, so that it can be a segment as modules are.

A loss is a function, called in the model or after it: torch's F.cross_entropy, or around it the one
that a language model of transformers says it uses, which makes its logits float32 first. While
`loss_calls` is at work, a call that needs a gradient goes through a module that has no parameters
and stands beside the model; what is done to a segment's forward can be done to that one's. A
function that somebody else put into torch's place is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

LossFunction = Callable[..., torch.Tensor]

_PLAIN = F.cross_entropy
_OF_LANGUAGE_MODELS = ("ForCausalLMLoss", "ForMaskedLMLoss")


class Loss(torch.nn.Module):
    """Calls a loss function."""

    def forward(self, function: LossFunction, *args: Any, **kwargs: Any) -> torch.Tensor:
        return function(*args, **kwargs)


_beside: WeakKeyDictionary[torch.nn.Module, Loss] = WeakKeyDictionary()
_at_work: list[Loss] = []
_inside = False  # whether a loss function is running: one may call the other


def loss_module(model: torch.nn.Module) -> Loss:
    """The module that stands for the loss beside this model, always the same one."""
    if model not in _beside:
        _beside[model] = Loss()
    return _beside[model]


@contextmanager
def loss_calls(model: torch.nn.Module) -> Iterator[None]:
    """Hand losses that need a gradient to `loss_module(model)` until the block is left.

    Of several models the one that was called last gets them: see `expect_loss`.
    """
    module = loss_module(model)
    with ExitStack() as stack:
        for owner in model.modules():
            stack.enter_context(_own_loss(owner))
        _at_work.append(module)
        stack.callback(_stop, module)
        if F.cross_entropy is _PLAIN:
            F.cross_entropy = _cross_entropy
        yield


def expect_loss(model: torch.nn.Module) -> None:
    """The model is called: a loss that comes now is likely its own."""
    if len(_at_work) > 1 and (module := _beside.get(model)) in _at_work:
        _at_work.remove(module)
        _at_work.append(module)


def _stop(module: Loss) -> None:
    _at_work.remove(module)
    if not _at_work and F.cross_entropy is _cross_entropy:
        F.cross_entropy = _PLAIN


def _cross_entropy(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _hand_over(_PLAIN, *args, **kwargs)


def _hand_over(function: LossFunction, *args: Any, **kwargs: Any) -> torch.Tensor:
    global _inside
    if torch.compiler.is_compiling() or _inside or not _at_work or not _needed(args, kwargs):
        return function(*args, **kwargs)
    _inside = True
    try:
        return _at_work[-1](function, *args, **kwargs)
    finally:
        _inside = False


def _needed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a gradient is wanted, of plain tensors alone."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    plain = all(type(tensor) is torch.Tensor for tensor in tensors)
    return plain and torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


class _Late:
    """The loss function of a model, asked for when it is called; a copy asks the copied model."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        owner = self._owner
        here = owner.__dict__.pop("_loss_function", None)  # none if a copy outlived the block
        try:
            function = owner.loss_function
        finally:
            if here is not None:
                owner.loss_function = here
        if getattr(function, "__name__", "") not in _OF_LANGUAGE_MODELS:
            return function(*args, **kwargs)  # type: ignore[no-any-return]
        return _hand_over(function, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return _Late, (self._owner,)


@contextmanager
def _own_loss(owner: Any) -> Iterator[None]:
    """Hand over the loss function of a language model of transformers; it has a place for one.

    Which it is shows when it is called: asked before, a model that has none warns.
    """
    has_place = isinstance(getattr(type(owner), "loss_function", None), property)
    if not has_place or "_loss_function" in owner.__dict__:  # somebody else's
        yield
        return

    late = _Late(owner)
    owner.loss_function = late
    try:
        yield
    finally:
        if owner.__dict__.get("_loss_function") is late:
            del owner._loss_function
