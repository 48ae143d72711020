"""One tensor of optimizer state in few bits, and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._pytree import register_pytree_node

from memfit.runtime.lowbit import bf16, log_codes
from memfit.runtime.lowbit.log_codes import SIGNED, UNSIGNED, Codebook
from memfit.runtime.lowbit.pieces import Pieces, piece_elements
from memfit.runtime.optimizer.footprint import rounded
from memfit.runtime.optimizer.on_host.memory import dense, dense_strides
from memfit.runtime.swap.moved import Geometry

Bits = Literal["8bit", "bf16_sr"]
CODEBOOKS: dict[str, Codebook] = {  # by the names that Adam, AdamW and SGD give their state
    "exp_avg": SIGNED,
    "momentum_buffer": SIGNED,
    "exp_avg_sq": UNSIGNED,
    "max_exp_avg_sq": UNSIGNED,
}
# Smaller ones stay as they are, as in the paper: they save little and are often delicate.
MIN_ELEMENTS = 4096
# An element of a piece takes these temporary bytes, or in compiled code its random number.
_WORKING_BYTES: dict[Bits, int] = {"bf16_sr": 12, "8bit": 40}
_DRAWN_BYTES = 4


@dataclass(frozen=True, eq=False)
class Packed:
    """A tensor in few bits; `largest` and `book` are None in bf16."""

    values: torch.Tensor
    largest: torch.Tensor | None
    book: Codebook | None
    geometry: Geometry


def pack(
    tensor: torch.Tensor,
    key: str,
    bits: Bits,
    random: torch.Generator,
    pieces: Pieces,
    into: Packed | None = None,
) -> Packed:
    """The state tensor of this name in few bits, in the memory of an earlier one if given."""
    geometry = Geometry(tensor.dtype, 0, tuple(tensor.shape), dense_strides(tensor))
    flat = _flat(dense(tensor)).float()
    packed = into
    if packed is None or packed.geometry != geometry:
        packed = _empty(flat, CODEBOOKS[key], bits, geometry)
    if packed.largest is None or packed.book is None:
        bf16.to_bf16_(flat, packed.values, random, pieces)
    else:
        log_codes.encode_(flat, packed.values, packed.largest, packed.book, random, pieces)
    return packed


def unpack(packed: Packed, pieces: Pieces) -> torch.Tensor:
    """The tensor as the optimizer made it, but for what rounding changed."""
    geometry = packed.geometry
    if packed.largest is None or packed.book is None:
        flat = packed.values
    else:
        flat = log_codes.decode(packed.values, packed.largest, packed.book, pieces)
    return flat.to(geometry.dtype).as_strided(geometry.size, geometry.stride)


def packable(key: str, value: object, bits: Bits) -> bool:
    """Whether a piece of state becomes smaller when packed."""
    return (
        key in CODEBOOKS
        and type(value) is torch.Tensor
        and value.is_floating_point()
        and value.numel() >= MIN_ELEMENTS
        and value.element_size() > (1 if bits == "8bit" else 2)
    )


def packed_bytes(elements: int, bits: Bits) -> int:
    """Bytes of a packed tensor, rounded as in the arena."""
    if bits == "bf16_sr":
        return rounded(2 * elements)
    return rounded(elements) + rounded(4 * log_codes.num_blocks(elements))


def working_bytes(tensor: torch.Tensor, bits: Bits, *, compiled: bool) -> int:
    """Temporary bytes while state like this tensor is packed or unpacked."""
    in_fp32 = 0 if tensor.dtype is torch.float32 else 4 * tensor.numel()
    at_a_time = min(piece_elements(compiled=compiled), tensor.numel())
    each = _DRAWN_BYTES if compiled else _WORKING_BYTES[bits]
    return each * at_a_time + in_fp32


def _empty(flat: torch.Tensor, book: Codebook, bits: Bits, geometry: Geometry) -> Packed:
    if bits == "bf16_sr":
        return Packed(torch.empty_like(flat, dtype=torch.bfloat16), None, None, geometry)
    largest = flat.new_empty(log_codes.num_blocks(flat.numel()))
    return Packed(torch.empty_like(flat, dtype=torch.uint8), largest, book, geometry)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _leaves(packed: Packed) -> tuple[list[Any], tuple[Codebook | None, Geometry]]:
    return [packed.values, packed.largest], (packed.book, packed.geometry)


def _from_leaves(leaves: Iterable[Any], context: tuple[Codebook | None, Geometry]) -> Packed:
    values, largest = leaves
    return Packed(values, largest, *context)


# What counts or lays out the memory of optimizer state finds the tensors.
register_pytree_node(Packed, _leaves, _from_leaves)
