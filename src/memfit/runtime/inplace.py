"""Make in-place modules safe to recompute, and restore them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from memfit.workload import unwrap


def inplace_modules(module: torch.nn.Module) -> list[str]:
    """Names of the modules inside `module` that work in place."""
    return [name for name, m in module.named_modules() if getattr(m, "inplace", False) is True]


@contextmanager
def inplace_off(model: torch.nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Turn `inplace` off on the named modules until the block is left."""
    modules = dict(unwrap(model).named_modules())
    changed = [modules[name] for name in names]
    before = [m.inplace for m in changed]
    for m in changed:
        m.inplace = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for m, old in zip(changed, before, strict=True):
            m.inplace = old
