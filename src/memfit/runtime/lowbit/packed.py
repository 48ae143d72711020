"""One tensor of optimizer state in few bits, and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._pytree import register_pytree_node

from memfit.runtime.lowbit import bf16, log_codes
from memfit.runtime.lowbit.log_codes import SIGNED, UNSIGNED, Codebook
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


@dataclass(frozen=True, eq=False)
class Packed:
    """A tensor in few bits; `largest` and `book` are None in bf16."""

    values: torch.Tensor
    largest: torch.Tensor | None
    book: Codebook | None
    geometry: Geometry

    def overwritten(self, other: Packed) -> Packed:
        """This one with the content of another of the same tensor."""
        if self.values.shape != other.values.shape:
            return other
        self.values.copy_(other.values)
        if self.largest is not None and other.largest is not None:
            self.largest.copy_(other.largest)
        return self


def pack(tensor: torch.Tensor, key: str, bits: Bits, random: torch.Generator) -> Packed:
    """The state tensor of this name in few bits."""
    geometry = Geometry(tensor.dtype, 0, tuple(tensor.shape), dense_strides(tensor))
    flat = _flat(dense(tensor)).float()
    if bits == "bf16_sr":
        return Packed(bf16.to_bf16(flat, random), None, None, geometry)
    book = CODEBOOKS[key]
    return Packed(*log_codes.encode(flat, book, random), book, geometry)


def unpack(packed: Packed) -> torch.Tensor:
    """The tensor as the optimizer made it, but for what rounding changed."""
    geometry = packed.geometry
    if packed.largest is None or packed.book is None:
        flat = packed.values
    else:
        flat = log_codes.decode(packed.values, packed.largest, packed.book)
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


def working_bytes(tensor: torch.Tensor, bits: Bits) -> int:
    """Temporary bytes while state like this tensor is packed or unpacked."""
    in_fp32 = 0 if tensor.dtype is torch.float32 else 4 * tensor.numel()
    at_a_time = min(log_codes.PIECE, log_codes.num_blocks(tensor.numel()) * log_codes.BLOCK)
    way = bf16 if bits == "bf16_sr" else log_codes
    return way.WORKING_BYTES_PER_ELEMENT * at_a_time + in_fp32


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _leaves(packed: Packed) -> tuple[list[Any], tuple[Codebook | None, Geometry]]:
    return [packed.values, packed.largest], (packed.book, packed.geometry)


def _from_leaves(leaves: Iterable[Any], context: tuple[Codebook | None, Geometry]) -> Packed:
    values, largest = leaves
    return Packed(values, largest, *context)


# What counts or lays out the memory of optimizer state finds the tensors.
register_pytree_node(Packed, _leaves, _from_leaves)
