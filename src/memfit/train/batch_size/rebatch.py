"""A batch of another size, made from an example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from memfit.errors import UsageError
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


def checked(make_batch: Callable[[int], Any]) -> Callable[[int], Any]:
    """The function, refusing a batch that is not of the size asked for.

    Rows may be more than samples (packed ones), as many for each at every size; where tensors do
    not agree on their rows nothing can be said.
    """
    seen = list[tuple[int, int]]()  # sizes and rows

    def make(size: int) -> Any:
        batch = make_batch(size)
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        rows = {tensor.shape[0] for tensor in tensors if tensor.dim()}
        if len(rows) != 1:
            return batch
        (length,) = rows
        first, its_length = (seen or [(size, length)])[0]
        if length % size or length * first != its_length * size:
            also = f", as make_batch({first}) does" if its_length == length and seen else ""
            raise UsageError(
                f"make_batch({size}) gives a batch of {length}{also}",
                hint=f"it has to build a batch of the size it is given: here {size} samples, which "
                "the first dimension of its tensors counts",
            )
        seen.append((size, length))
        return batch

    return make
