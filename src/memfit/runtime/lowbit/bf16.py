"""Numbers as bf16, rounded stochastically: right on average, where nearest would stand still."""

from __future__ import annotations

import torch

from memfit.runtime.lowbit.log_codes import PIECE

_CUT_BITS = 16
WORKING_BYTES_PER_ELEMENT = 12


def to_bf16(flat: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """A one-dimensional fp32 tensor in bf16.

    Each number becomes one of its neighbours, with the odds of its distance.
    """
    result = torch.empty_like(flat, dtype=torch.bfloat16)
    for piece, target in zip(flat.split(PIECE), result.split(PIECE), strict=True):
        bits = piece.view(torch.int32)
        noise = torch.empty_like(bits).random_(0, 2**_CUT_BITS, generator=random)
        rounded = noise.add_(bits).bitwise_and_(-(2**_CUT_BITS)).view(torch.float32)
        target.copy_(torch.where(piece.isfinite(), rounded, piece))
    return result
