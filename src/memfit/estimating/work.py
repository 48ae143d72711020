"""What the operators of a step compute and move, and a guess of its seconds on a card."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from memfit.ir.cards import Card

# Shares of the data sheet's rates. With these, five steps that were measured on an H200 are guessed
# at 0.6 to 1.04 of their seconds.
COMPUTE_SHARE, MOVE_SHARE = 0.5, 0.6
_HALF = (torch.float16, torch.bfloat16)


class Work:
    """FLOPs and bytes moved, operator by operator."""

    def __init__(self) -> None:
        self._operators: Counter[tuple[str, int, int]] = Counter()  # kind, FLOPs, bytes

    @property
    def flops(self) -> int:
        """Of matrix products, convolutions and attention: those torch has formulas for."""
        return sum(flops * count for (_, flops, _), count in self._operators.items())

    @property
    def moved_bytes(self) -> int:
        """Every operator reads its inputs and writes its results once."""
        return sum(moved * count for (_, _, moved), count in self._operators.items())

    def add(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, *, made: bool) -> None:
        """Count one call of an operator; one that made nothing and changed nothing is a view."""
        if not made and not func._schema.is_mutable:
            return
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        results = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        flops = _flops(func, args, kwargs, result)
        moved = sum(t.numel() * t.element_size() for t in (*tensors, *results))
        self._operators[_kind(func, tensors), flops, moved] += 1

    def guessed_seconds(self, card: Card) -> float:
        """A roofline: each operator takes the longer of its arithmetic and its traffic."""
        rates = {
            "fp16": card.half_flops,
            "bf16": card.half_flops if card.bf16 else card.fp32_flops,
            "tf32": card.tf32_flops,
            "fp32": card.fp32_flops,
        }
        move_s = 1 / (MOVE_SHARE * card.bytes_per_s)
        seconds = 0.0
        for (kind, flops, moved), count in self._operators.items():
            seconds += count * max(flops / (COMPUTE_SHARE * rates[kind]), moved * move_s)
        return seconds


def _flops(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0
    if func.name().startswith("aten::_scaled_dot_product_"):
        args = _with_heads_of_query(args, at=1 if func.name().endswith("_backward") else 0)
    return int(formula(*args, **kwargs, out_val=result))


def _with_heads_of_query(args: Any, at: int) -> list[Any]:
    """Give the key and value after the query at `at` its heads: kernels repeat theirs so.

    torch 2.11 refuses to count fewer: https://github.com/pytorch/pytorch/pull/177169.
    """
    heads = args[at].shape[1]
    shapes = [(t.shape[0], heads, *t.shape[2:]) for t in args[at + 1 : at + 3]]
    return [*args[: at + 1], *shapes, *args[at + 3 :]]


def _kind(func: Any, tensors: list[torch.Tensor]) -> str:
    """Which rate of a card applies; torch lets convolutions use tf32, matrix products when told."""
    dtype = tensors[0].dtype if tensors else torch.float32
    if dtype in _HALF:
        return "fp16" if dtype is torch.float16 else "bf16"
    tf32 = "convolution" in func.name() or torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "fp32"
