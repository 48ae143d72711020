"""Numbers as bf16, rounded stochastically: right on average, where nearest would stand still."""

from __future__ import annotations

import torch

from memfit.runtime.lowbit.pieces import Pieces

_CUT_BITS = 16


def to_bf16_(
    flat: torch.Tensor, result: torch.Tensor, random: torch.Generator, pieces: Pieces
) -> None:
    """Write a one-dimensional fp32 tensor in bf16.

    Each number becomes one of its neighbours, with the odds of its distance.
    """
    for run, part in pieces.of(flat.numel()):
        noise = torch.empty_like(flat[part], dtype=torch.int32)
        run(_round_, flat[part], noise.random_(0, 2**_CUT_BITS, generator=random), result[part])


def _round_(numbers: torch.Tensor, noise: torch.Tensor, result: torch.Tensor) -> None:
    rounded = noise.add_(numbers.view(torch.int32)).bitwise_and_(-(2**_CUT_BITS))
    result.copy_(torch.where(numbers.isfinite(), rounded.view(torch.float32), numbers))
