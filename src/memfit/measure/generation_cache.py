"""Keys and values that language models keep for generation, switched off where a step is run.

A configuration's use_cache hands every block one cache that grows with each call, so that a block
that runs again sees its own past. Training has no use for it; transformers, too, switches it off
where it checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

NOTE = "use_cache of the model's configuration is off in the step: a cache is for generation"


def caching_configs(model: torch.nn.Module) -> list[Any]:
    """The configurations inside the model that ask for a cache, each once."""
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            found[id(config)] = config
    return list(found.values())


@contextmanager
def cache_off(model: torch.nn.Module) -> Iterator[None]:
    """Turn `use_cache` off in the model's configurations until the block is left."""
    changed = caching_configs(model)
    for config in changed:
        config.use_cache = False
    try:
        yield
    finally:
        for config in changed:
            config.use_cache = True
