"""What a plan is made for, as text that is compared before the plan is used."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from memfit.workload import Workload, unwrap


def describe(workload: Workload) -> dict[str, str]:
    """The workload in words."""
    model = unwrap(workload.model)
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "name": workload.name or type(model).__name__,
        "model": f"{type(model).__name__} with {parameters:,} parameters",
        "batch": batch_signature(workload.batch),
        "optimizer": type(workload.optimizer).__name__,
        "device": workload.device.type,
    }


def batch_signature(batch: Any) -> str:
    """The batch's shapes and dtypes."""
    leaves, spec = tree_flatten(batch)
    shapes = [
        f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        if isinstance(x, torch.Tensor)
        else type(x).__name__
        for x in leaves
    ]
    return " ".join(shapes) or str(spec)


def is_no_larger(batch: Any, planned: Any) -> bool:
    """Whether `batch` has the structure of `planned` and no dimension beyond it."""
    leaves, spec = tree_flatten(batch)
    planned_leaves, planned_spec = tree_flatten(planned)
    if spec != planned_spec:
        return False
    for leaf, old in zip(leaves, planned_leaves, strict=True):
        if isinstance(leaf, torch.Tensor) != isinstance(old, torch.Tensor):
            return False
        if isinstance(leaf, torch.Tensor):
            if leaf.dtype != old.dtype or leaf.dim() != old.dim():
                return False
            if any(n > m for n, m in zip(leaf.shape, old.shape, strict=True)):
                return False
    return True


def model_signature(model: torch.nn.Module) -> str:
    """A hash of the model's modules and of its parameters' names, shapes and dtypes."""
    model = unwrap(model)
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        digest.update(f"{name}:{type(module).__name__};".encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name}:{tensor.dtype}{tuple(tensor.shape)}{tensor.requires_grad};".encode())
    return digest.hexdigest()[:16]
