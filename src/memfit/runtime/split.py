"""A batch in parts, one after the other: less memory, the same sums in another order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from memfit.errors import UsageError
from memfit.workload import Workload, unwrap

_HINT = "the first dimension of every tensor must count the samples"


def samples_in(batch: Any, *, hint: str = _HINT) -> int:
    """Samples in the batch: the leading size its tensors agree on; 1 beside others broadcasts."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    if len(sizes) > 1:
        sizes.discard(1)
    if not sizes:
        raise UsageError("the batch has no tensor whose size could be changed", hint=hint)
    if len(sizes) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise UsageError(
            f"the tensors of the batch do not agree on a first dimension: {shapes}", hint=hint
        )
    (size,) = sizes
    if size == 0:
        raise UsageError("the batch is empty: there is no sample to repeat", hint=hint)
    return size


def parts_of(batch: Any, count: int) -> list[Any]:
    """The batch in `count` parts as equal as can be, without copies; fewer when it is smaller."""
    if count == 1:
        return [batch]
    if count < 1:
        raise UsageError(
            f"a batch cannot be run in {count} parts",
            hint="the plan's `split` counts them: 1 or more",
        )
    size = samples_in(batch)
    length = -(-size // count)
    starts = range(0, size, length)

    def cut(leaf: Any, start: int) -> Any:
        counts = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == size
        return leaf[start : start + length] if counts else leaf

    return [tree_map(partial(cut, start=start), batch) for start in starts]


def part_of(workload: Workload, count: int) -> Workload:
    """The workload of one part, the largest; its model and optimizer are the same."""
    return workload if count == 1 else replace(workload, batch=parts_of(workload.batch, count)[0])


def refused_split(workload: Workload, *, forced: bool = False) -> str | None:
    """Why a batch cannot be split without changing what is computed, or None.

    It may change that when `forced`.
    """
    norm = norm_over_the_batch(workload)
    if norm is not None and not forced:
        return (
            f"batch norm {norm!r} would take its statistics over parts of the batch; "
            "force microbatch to train so"
        )
    try:
        size = samples_in(workload.batch)
    except UsageError as error:
        return error.message
    return "a batch of one cannot be split" if size < 2 else None


def norm_over_the_batch(workload: Workload) -> str | None:
    """The name of a batch norm that takes statistics of the batches it sees, or None."""
    norms = torch.nn.modules.batchnorm._BatchNorm
    for name, module in unwrap(workload.model).named_modules():
        if isinstance(module, norms) and (module.training or module.running_mean is None):
            return name
    return None
