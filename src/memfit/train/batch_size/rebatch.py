"""A batch of another size, made from an example."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from memfit.errors import UsageError

_HINT = (
    "the first dimension of every tensor must count the samples; from Python, "
    "make_batch=f gives a function f(size) that builds a batch"
)


def batch_size_of(batch: Any) -> int:
    """Samples in the batch: the leading size its tensors agree on; 1 beside others broadcasts."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    if len(sizes) > 1:
        sizes.discard(1)
    if not sizes:
        raise UsageError("the batch has no tensor whose size could be changed", hint=_HINT)
    if len(sizes) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise UsageError(
            f"the tensors of the batch do not agree on a first dimension: {shapes}", hint=_HINT
        )
    (size,) = sizes
    if size == 0:
        raise UsageError("the batch is empty: there is no sample to repeat", hint=_HINT)
    return size


def rebatch(batch: Any, size: int) -> Any:
    """The batch with `size` samples: its own, repeated or cut short, in memory of their own."""
    old = batch_size_of(batch)

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != old:
            return leaf
        whole, rest = divmod(size, old)
        plain = leaf.detach()
        # Unlike indexing, cat keeps the memory format of images.
        parts = [plain] * whole + ([plain[:rest]] if rest else [])
        return torch.cat(parts).requires_grad_(leaf.requires_grad)

    return tree_map(resized, batch)
