"""A batch in parts, one after the other: less memory, the same sums in another order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from memfit.errors import UsageError
from memfit.workload import Workload, unwrap


def samples_in(batch: Any) -> int:
    """The first dimension that all tensors of the batch share; UsageError when they do not."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    if len(sizes) != 1 or 0 in sizes:
        raise UsageError(
            "the tensors of the batch do not agree on a first dimension that counts samples",
            hint="a batch whose tensors begin with the same size can be split",
        )
    return int(sizes.pop())


def parts_of(batch: Any, count: int) -> list[Any]:
    """The batch in `count` parts as equal as can be, without copies; fewer when it is smaller."""
    if count == 1:
        return [batch]
    size = samples_in(batch)
    length = -(-size // count)
    starts = range(0, size, length)

    def part(start: int) -> Any:
        return tree_map(
            lambda leaf: leaf[start : start + length] if isinstance(leaf, torch.Tensor) else leaf,
            batch,
        )

    return [part(start) for start in starts]


def part_of(workload: Workload, count: int) -> Workload:
    """The workload of one part, the largest; its model and optimizer are the same."""
    return workload if count == 1 else replace(workload, batch=parts_of(workload.batch, count)[0])


def refused_split(workload: Workload) -> str | None:
    """Why a batch cannot be split without changing what is computed, or None."""
    norms = torch.nn.modules.batchnorm._BatchNorm
    for name, module in unwrap(workload.model).named_modules():
        if isinstance(module, norms) and module.training and module.track_running_stats:
            return f"batch norm {name!r} would see its statistics in parts"
    try:
        size = samples_in(workload.batch)
    except UsageError as error:
        return error.message
    return "a batch of one cannot be split" if size < 2 else None
