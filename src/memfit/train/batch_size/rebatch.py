"""A batch of another size, made from an example."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from memfit.runtime.split import samples_in

HINT = (
    "the first dimension of every tensor must count the samples; from Python, "
    "make_batch=f gives a function f(size) that builds a batch"
)


def rebatch(batch: Any, size: int) -> Any:
    """The batch with `size` samples: its own, repeated or cut short, in memory of their own."""
    old = samples_in(batch, hint=HINT)

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != old:
            return leaf
        whole, rest = divmod(size, old)
        plain = leaf.detach()
        # Unlike indexing, cat keeps the memory format of images.
        parts = [plain] * whole + ([plain[:rest]] if rest else [])
        return torch.cat(parts).requires_grad_(leaf.requires_grad)

    return tree_map(resized, batch)
