"""Numbers as bf16, rounded stochastically: right on average, where nearest would stand still."""

from __future__ import annotations

import torch

_CUT_BITS = 16
WORKING_BYTES_PER_ELEMENT = 12


def to_bf16(tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """The fp32 tensor in bf16, each number rounded to a neighbour with the odds of its distance."""
    bits = tensor.view(torch.int32)
    noise = torch.empty_like(bits).random_(0, 2**_CUT_BITS, generator=random)
    rounded = noise.add_(bits).bitwise_and_(-(2**_CUT_BITS)).view(torch.float32)
    return torch.where(tensor.isfinite(), rounded, tensor).to(torch.bfloat16)
