"""How many rows of logits are made at a time."""

from __future__ import annotations

import torch

from memfit.errors import UsageError

TILE_BYTES = 256 * 2**20
_ROW_GRAIN = 128  # matrix products like whole multiples of these
_COLUMN_GRAIN = 64


def bytes_per_logit(dtype: torch.dtype, compiled: bool) -> int:
    """Bytes that one logit takes while its tile is at work."""
    wide = dtype.itemsize >= torch.float32.itemsize
    return dtype.itemsize if wide or compiled else dtype.itemsize + torch.float32.itemsize


def row_stride(vocab: int) -> int:
    """Logits from the beginning of one row to that of the next, for fast products on CUDA."""
    return -(-vocab // _COLUMN_GRAIN) * _COLUMN_GRAIN


def rows_per_tile(
    rows: int, vocab: int, dtype: torch.dtype, *, tile_bytes: int = TILE_BYTES, compiled: bool
) -> int:
    """Rows of a tile whose logits of `dtype` take `tile_bytes` at most; one at least.

    Tiles are about equal: compiled code works on all rows of the last one, whether there or not.
    """
    if tile_bytes < 1:
        raise UsageError(f"tile_bytes is {tile_bytes}", hint="give a tile a positive size in bytes")
    fitting = tile_bytes // (row_stride(vocab) * bytes_per_logit(dtype, compiled))
    if fitting > _ROW_GRAIN:
        fitting -= fitting % _ROW_GRAIN
    fitting = max(1, fitting)
    tiles = max(1, -(-rows // fitting))
    equal = -(-rows // tiles)
    if equal > _ROW_GRAIN:
        equal += -equal % _ROW_GRAIN
    return max(1, min(rows, fitting, equal))
