"""Numbers as one byte each: a share of the largest number of their block, on a logarithmic scale.

Blocks as in "8-bit Optimizers via Block-wise Quantization" (Dettmers et al., 2021), with eight
codes to a factor of two in the place of its dynamic map, and with stochastic rounding: an average
that moves by less than a code in a step would not move at all when rounded to the nearest.
Not optimal: large numbers have no finer codes than small ones.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from memfit.runtime.lowbit.pieces import Pieces

BLOCK = 256
PER_OCTAVE = 8
# The most that a number within the range of the codes is changed by, as a share of itself.
RELATIVE_ERROR = 2 ** (1 / PER_OCTAVE) - 1


class Codebook(NamedTuple):
    """Which byte means zero, and how many codes lie above it; as many lie below, if any do."""

    zero: int
    levels: int

    @property
    def smallest(self) -> float:
        """The smallest share of the block's largest number that has a code."""
        return 2 ** ((1 - self.levels) / PER_OCTAVE)


SIGNED = Codebook(127, 127)
UNSIGNED = Codebook(0, 255)  # no number but zero becomes zero


def encode_(
    flat: torch.Tensor,
    codes: torch.Tensor,
    largest: torch.Tensor,
    book: Codebook,
    random: torch.Generator,
    pieces: Pieces,
) -> None:
    """Write the codes of a one-dimensional fp32 tensor, and the largest magnitude of each block.

    A block that holds an infinity or NaN becomes NaN.
    """
    table = _table(book, flat.device)[book.zero :]
    for run, part in pieces.of(flat.numel(), BLOCK):
        found, peaks = codes[part], largest[_blocks_of(part)]
        blocks, whole = flat[part], found
        missing = -blocks.numel() % BLOCK
        if missing:
            blocks = torch.nn.functional.pad(blocks, (0, missing))
            whole = torch.empty_like(blocks, dtype=torch.uint8)
        draw = torch.rand(blocks.shape, generator=random, device=flat.device)
        write = _write_signed_ if book.zero else _write_unsigned_
        run(write, *(t.view(-1, BLOCK) for t in (blocks, draw, whole)), peaks, table)
        if missing:
            found.copy_(whole[: found.numel()])


def decode(
    codes: torch.Tensor, largest: torch.Tensor, book: Codebook, pieces: Pieces
) -> torch.Tensor:
    """The numbers of these codes."""
    flat = torch.empty(codes.numel(), device=codes.device)
    table = _table(book, codes.device)
    for run, part in pieces.of(codes.numel(), BLOCK):
        peaks = largest[_blocks_of(part)]
        shape = len(peaks), -1
        run(_read_into_, flat[part].view(shape), codes[part].view(shape), peaks, table)
    return flat


def num_blocks(elements: int) -> int:
    """How many blocks a number of elements takes."""
    return -(-elements // BLOCK)


def _blocks_of(part: slice) -> slice:
    return slice(part.start // BLOCK, num_blocks(part.stop))


def _write_signed_(
    blocks: torch.Tensor,
    draw: torch.Tensor,
    codes: torch.Tensor,
    largest: torch.Tensor,
    table: torch.Tensor,
) -> None:
    peak, steps = _steps(blocks, draw, table)
    largest.copy_(peak)
    codes.copy_(steps * blocks.sign().int() + SIGNED.zero)


def _write_unsigned_(
    blocks: torch.Tensor,
    draw: torch.Tensor,
    codes: torch.Tensor,
    largest: torch.Tensor,
    table: torch.Tensor,
) -> None:
    peak, steps = _steps(blocks, draw, table)
    largest.copy_(peak)
    codes.copy_(torch.where(blocks > 0, steps.clamp(min=1), 0))


def _read_into_(
    numbers: torch.Tensor, codes: torch.Tensor, largest: torch.Tensor, table: torch.Tensor
) -> None:
    numbers.copy_(table[codes.int()] * largest.unsqueeze(1))


def _steps(
    blocks: torch.Tensor, draw: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest magnitude of each block, and how many codes each number lies above zero."""
    size = blocks.abs()
    peak = size.amax(1)
    peak = torch.where(peak.isfinite(), peak, torch.nan)
    return peak, _rounded(size / peak.unsqueeze(1), draw, table)


def _rounded(share: torch.Tensor, draw: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The place in the table of each share: one of the two that it lies between."""
    levels = len(table) - 1
    # A GPU's division is not exact: the largest of a block may be more than all of itself.
    share = share.nan_to_num(0.0, 0.0, 0.0).clamp(max=1.0)
    below = ((share.log2() * PER_OCTAVE).floor() + levels).clamp(0, levels).int()
    lower = table[below]
    gap = table[(below + 1).clamp(max=levels)] - lower
    return below + (draw * gap < share - lower)


@cache
def _table(book: Codebook, device: torch.device) -> torch.Tensor:
    """The share that each byte means."""
    up = [2 ** ((step - book.levels) / PER_OCTAVE) for step in range(1, book.levels + 1)]
    down = [-share for share in reversed(up)] if book.zero else []
    return torch.tensor([*down, 0.0, *up], device=device)
