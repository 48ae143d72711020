"""Numbers as one byte each: a share of the largest number of their block, on a logarithmic scale.

Blocks as in "8-bit Optimizers via Block-wise Quantization" (Dettmers et al., 2021), with eight
codes to a factor of two in the place of its dynamic map, and with stochastic rounding: an average
that moves by less than a code in a step would not move at all when rounded to the nearest.
Not optimal: large numbers have no finer codes than small ones.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch

BLOCK = 256
PER_OCTAVE = 8
# The most that a number within the range of the codes is changed by, as a share of itself.
RELATIVE_ERROR = 2 ** (1 / PER_OCTAVE) - 1
# Temporary memory does not grow with the tensor beyond this many elements.
PIECE = 2**20
WORKING_BYTES_PER_ELEMENT = 40


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


def encode(
    flat: torch.Tensor, book: Codebook, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of a one-dimensional fp32 tensor, and the largest magnitude of each block.

    A block that holds an infinity or NaN becomes NaN.
    """
    codes = torch.empty(flat.numel(), dtype=torch.uint8, device=flat.device)
    largest = torch.empty(num_blocks(flat.numel()), device=flat.device)
    for start in range(0, flat.numel(), PIECE):
        piece = flat[start : start + PIECE]
        blocks = torch.nn.functional.pad(piece, (0, -piece.numel() % BLOCK)).view(-1, BLOCK)
        peak = torch.linalg.vector_norm(blocks, math.inf, dim=1)
        first = start // BLOCK
        largest[first : first + len(peak)] = peak
        found = _codes(blocks, peak, book, random).view(-1)
        codes[start : start + PIECE] = found[: piece.numel()]
    return codes, largest


def decode(codes: torch.Tensor, largest: torch.Tensor, book: Codebook) -> torch.Tensor:
    """The numbers of these codes."""
    flat = torch.empty(codes.numel(), device=codes.device)
    table = _table(book, codes.device)
    for start in range(0, codes.numel(), PIECE):
        piece = codes[start : start + PIECE]
        first = start // BLOCK
        scales = largest[first : first + PIECE // BLOCK].repeat_interleave(BLOCK)
        flat[start : start + PIECE] = table[piece.int()] * scales[: piece.numel()]
    return flat


def num_blocks(elements: int) -> int:
    """How many blocks a number of elements takes."""
    return -(-elements // BLOCK)


def _codes(
    blocks: torch.Tensor, peak: torch.Tensor, book: Codebook, random: torch.Generator
) -> torch.Tensor:
    table = _table(book, blocks.device)[book.zero :]
    share = (blocks.abs() / peak.unsqueeze(1)).nan_to_num_(0.0, 0.0, 0.0)
    below = (share.log2() * PER_OCTAVE).floor_().add_(book.levels).clamp_(0, book.levels).int()
    lower = table[below]
    gap = table[(below + 1).clamp_(max=book.levels)] - lower
    draw = torch.rand(blocks.shape, generator=random, device=blocks.device)
    steps = below + (draw * gap < share - lower)
    if book.zero:
        steps *= blocks.sign().int()
    else:
        steps = torch.where(blocks > 0, steps.clamp_(min=1), 0)
    return (steps + book.zero).to(torch.uint8)


@cache
def _table(book: Codebook, device: torch.device) -> torch.Tensor:
    """The share that each byte means."""
    up = [2 ** ((step - book.levels) / PER_OCTAVE) for step in range(1, book.levels + 1)]
    down = [-share for share in reversed(up)] if book.zero else []
    return torch.tensor([*down, 0.0, *up], device=device)
