"""Tensors as bytes, and tensors in slots of host memory."""

from __future__ import annotations

import torch

from memfit.runtime.swap.arena import Slot
from memfit.runtime.swap.moved import Geometry


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides if it has no gaps, else those that a copy without gaps would have."""
    return torch.empty_like(tensor, device="meta").stride()


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it that has no gaps."""
    return tensor if dense_strides(tensor) == tensor.stride() else tensor.clone()


def tensor_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor without gaps."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    size = tensor.numel() * tensor.element_size()
    return Geometry(torch.uint8, start, (size,), (1,)).in_(tensor.untyped_storage())


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All memory of a storage."""
    return Geometry(torch.uint8, 0, (storage.nbytes(),), (1,)).in_(storage)


def host_tensor(slot: Slot, geometry: Geometry) -> torch.Tensor:
    """The tensor that lies so in a slot, with a storage that ends where it ends."""
    dtype, offset, shape, stride = geometry
    start = offset * dtype.itemsize
    stop = start + torch.Size(shape).numel() * dtype.itemsize
    memory = torch.from_numpy(slot.view[start:stop].numpy())
    return memory.view(dtype).as_strided(shape, stride)
