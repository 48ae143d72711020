"""Which saved tensors can leave the device."""

from __future__ import annotations

import torch


def may_move(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is a plain one and no parameter, nor a view of one.

    What else is held for longer than the step (buffers, the batch) is told by its owners later.
    """
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    base = tensor._base
    return not (_is_trained(tensor) or (base is not None and _is_trained(base)))


def can_be_rebuilt(tensor: torch.Tensor) -> bool:
    """Whether bytes and strides are all there is to a tensor."""
    return not (has_lazy_bits(tensor) or tensor.is_quantized or tensor.is_nested)


def has_lazy_bits(tensor: torch.Tensor) -> bool:
    """Whether a tensor is conjugated or negated only when it is read."""
    return tensor.is_conj() or tensor.is_neg()


def _is_trained(tensor: torch.Tensor) -> bool:
    """A parameter, or an input whose gradient is wanted."""
    return tensor.requires_grad and tensor.is_leaf
