"""Operators on CPU tensors that allocate and save what they would on CUDA.

Three things differ by far: attention, which has fused kernels there; dropout, which keeps a mask of
one byte per number; and autocast, which has another list of operators that run in fp32. Replaced in
the dispatcher, so that every caller gets them. The only module that knows these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD_DIM = 256
# torch's list for CUDA (torch/csrc/autocast_mode.h), as far as the CPU has it otherwise.
_FP32_UNDER_AUTOCAST = (
    "cumsum",
    "exp",
    "expm1",
    "group_norm",
    "layer_norm",
    "log",
    "log10",
    "log1p",
    "log2",
    "log_softmax.int",
    "nll_loss",
    "pow.Scalar",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "reciprocal",
    "rsqrt",
    "softmax.int",
    "softplus",
    "sum",
    "sum.dim_IntList",
)


@contextmanager
def cuda_operators() -> Iterator[None]:
    """Put CUDA's choices in the place of the CPU's, until the block is left."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
        library.impl("dropout", _dropout, "AutogradCPU")
        for name in _FP32_UNDER_AUTOCAST:
            library.impl(name, partial(_in_fp32, _overload(name)), "AutocastCPU")
        yield
    finally:
        library._destroy()


def step_as_on_cuda(optimizer: torch.optim.Optimizer, *, of_target: bool = False) -> None:
    """Let the optimizer step over all tensors at once, as torch does on CUDA unless told.

    The Adam of a target is fused there.
    """
    for group in optimizer.param_groups:
        if of_target and isinstance(optimizer, torch.optim.Adam):
            group["fused"] = True
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
        if group.get("capturable"):
            group["capturable"] = False  # torch refuses it here; it moves single numbers only


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention by the kernel that CUDA prefers: flash, else memory-efficient, else plain."""
    heads_alike = query.dim() == 4 and query.shape[1] == key.shape[1]
    half = query.dtype in _HALF
    if query.dim() == 4 and half and attn_mask is None and query.shape[-1] <= _FLASH_HEAD_DIM:
        made = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )
    elif heads_alike and (half or query.dtype is torch.float32):
        needs_sums = any(t.requires_grad for t in (query, key, value))
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        made = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_sums, dropout_p, is_causal, scale=scale
        )
    else:
        made = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    result: torch.Tensor = made[0]
    return result


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    if mask.dtype is torch.bool:
        zeros = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
        mask = zeros.masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    dropped: torch.Tensor = aten.native_dropout(x, p, train)[0]
    return dropped


def _in_fp32(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def widen(value: Any) -> Any:
        narrow = isinstance(value, torch.Tensor) and value.dtype in _HALF
        return value.float() if narrow else value

    with torch.autocast("cpu", enabled=False):
        return operator(*tree_map(widen, args), **tree_map(widen, kwargs))


def _overload(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    found: Callable[..., Any] = getattr(getattr(aten, packet), overload or "default")
    return found
