"""Weights as int8 with a scale: each number within half a scale of itself, zero exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import embedding

from memfit.errors import UsageError

_LEAST, _MOST = -128, 127


@dataclass(frozen=True, eq=False)
class Int8Tensor:
    """A tensor in int8: (codes - zero_point) * scale; `zero_point` is None where it is zero.

    `scale` has one number, or one per channel; the channels lie along `axis`.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    dtype: torch.dtype
    axis: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        zero_point = 0 if self.zero_point is None else self.zero_point.nbytes
        return self.codes.nbytes + self.scale.nbytes + zero_point

    @property
    def num_zero_channels(self) -> int:
        """How many channels hold nothing but zeros."""
        return int((~self.nonzero_channels()).sum())

    def nonzero_channels(self) -> torch.Tensor:
        """Which channels hold anything but zeros, one flag each."""
        zero = 0 if self.zero_point is None else self.zero_point
        return _by_channel(self.codes != zero, self.axis).any(1)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor in its own type, or in another."""
        return _float(self.codes, self.scale, self.zero_point, dtype or self.dtype)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Some rows of a matrix that has one scale, or one per row."""

        def chosen(numbers: torch.Tensor) -> torch.Tensor:
            per_row = len(numbers) == len(self.codes)
            return embedding(indices, numbers) if per_row else numbers.reshape(())

        zero_point = None if self.zero_point is None else chosen(self.zero_point)
        codes = embedding(indices, self.codes)
        return _float(codes, chosen(self.scale), zero_point, self.dtype)


def quantize(
    weight: torch.Tensor, *, symmetric: bool = True, axis: int = 0, per_channel: bool = True
) -> Int8Tensor:
    """The weight in int8, with a scale per channel along `axis`, or one in all.

    Symmetric codes lie evenly around zero; others use all 256 for what lies between the smallest
    and the largest number, zero included. A channel that is not zero does not become so: it is
    refused.
    """
    values = weight.detach()
    if not values.is_floating_point() or not values.numel():
        raise UsageError(
            f"a weight of {tuple(values.shape)} {values.dtype} has no int8 form",
            hint="leave its module out",
        )
    if not bool(values.isfinite().all()):
        raise UsageError(
            f"a weight of shape {tuple(values.shape)} holds infinities or NaN",
            hint="mend the checkpoint, or leave its module out",
        )
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    across = [d for d in range(values.ndim) if not per_channel or d != axis % values.ndim]
    low = values.amin(across, keepdim=True).clamp_(max=0)
    high = values.amax(across, keepdim=True).clamp_(min=0)
    if symmetric:
        scale = torch.maximum(high, -low) / _MOST
    else:
        scale = high / (_MOST - _LEAST) - low / (_MOST - _LEAST)
    _refuse_tiny(scale, high - low)
    divisor = scale.where(scale > 0, 1)
    codes = (values / divisor).round_()
    zero_point = None
    if not symmetric:
        zero_point = _LEAST - (low / divisor).round_()
        codes += zero_point
        zero_point = zero_point.to(torch.int16)
    codes = codes.clamp_(_LEAST, _MOST).to(torch.int8)
    found = Int8Tensor(codes, scale, zero_point, weight.dtype, axis)
    _refuse_lost(values, found)
    return found


def _by_channel(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """The tensor with one row per channel; a single row where it has one dimension, or none."""
    return tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.movedim(axis, 0).flatten(1)


def _float(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    values = codes.to(scale.dtype)
    if zero_point is None:
        return values.mul_(scale).to(dtype)
    # Half a scale from the largest number of a type there may be infinity.
    most = min(torch.finfo(dtype).max, torch.finfo(scale.dtype).max)
    return values.sub_(zero_point).mul_(scale).clamp_(-most, most).to(dtype)


def _refuse_tiny(scale: torch.Tensor, spread: torch.Tensor) -> None:
    """Refuse channels that are not zero, but so small that their codes would be."""
    tiny = (spread > 0) & (scale < torch.finfo(scale.dtype).tiny)
    if bool(tiny.any()):
        raise UsageError(
            f"{int(tiny.sum())} of {tiny.numel()} channels hold numbers too small for a scale "
            f"(largest spread {float(spread[tiny].max()):.2g})",
            hint="set them to zero, or leave their module out",
        )


def _refuse_lost(values: torch.Tensor, int8: Int8Tensor) -> None:
    """Refuse channels that are not zero, and whose codes all are: others are so much larger."""
    channels = _by_channel(values, int8.axis)
    lost = channels.any(1) & ~int8.nonzero_channels()
    if bool(lost.any()):
        raise UsageError(
            f"{int(lost.sum())} of {lost.numel()} channels would become all zero: their largest "
            f"number is {float(channels[lost].abs().max()):.2g}, and the scale, one for the whole "
            f"weight, is {float(int8.scale.max()):.2g}",
            hint="take a scale per channel (int8_weights or int8_weights_asymmetric; "
            "Int8Weights(per_channel=True)), or leave its module out",
        )
