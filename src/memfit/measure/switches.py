"""Switches of models that work against a plan, turned off where a step is run.

A configuration's use_cache hands every block one cache that grows with each call, so that a block
that runs again sees its own past; training has no use for it, and transformers, too, turns it off
where it checkpoints. A model's own gradient checkpointing runs blocks again whatever a plan says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CACHE = "use_cache"
_CHECKPOINTING = ("gradient_checkpointing", "grad_checkpointing")  # of transformers, of timm
CACHE_OFF = "use_cache of the model's configuration is off in the step: a cache is for generation"
CHECKPOINTING_OFF = (
    "the model's own gradient checkpointing is off in the step: the plan says what is recomputed"
)


@contextmanager
def switched_off(model: torch.nn.Module) -> Iterator[None]:
    """Turn the model's caches and its own checkpointing off until the block is left."""
    changed = _turned_on(model)
    for owner, name in changed:
        setattr(owner, name, False)
    try:
        yield
    finally:
        for owner, name in changed:
            setattr(owner, name, True)


def switch_notes(model: torch.nn.Module) -> list[str]:
    """What will be turned off in the model's steps, in words."""
    names = {name for _, name in _turned_on(model)}
    cache = [CACHE_OFF] if _CACHE in names else []
    return [*cache, *([CHECKPOINTING_OFF] if names - {_CACHE} else [])]


def _turned_on(model: torch.nn.Module) -> list[tuple[Any, str]]:
    """The modules and configurations with a switch that is on, each once."""
    found: dict[tuple[int, str], tuple[Any, str]] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        for owner, name in ((config, _CACHE), *((module, name) for name in _CHECKPOINTING)):
            if getattr(owner, name, None) is True:
                found[id(owner), name] = (owner, name)
    return list(found.values())
