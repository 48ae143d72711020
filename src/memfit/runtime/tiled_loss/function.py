"""The autograd function: everything in forward, a factor in backward."""

from __future__ import annotations

from typing import Any

import torch

from memfit.errors import UsageError
from memfit.runtime.tiled_loss.one_pass import (
    Head,
    Rows,
    Tiling,
    losses_and_gradients,
    losses_only,
)
from memfit.runtime.tiled_loss.softmax import softmax_dtype


def tiled_sum(
    hidden: torch.Tensor,
    head: Head,
    labels: torch.Tensor,
    counted: torch.Tensor,
    divisor: torch.Tensor,
    smoothing: float,
    tiling: Tiling,
) -> torch.Tensor:
    """Return the sum of the losses of the `counted` rows over `divisor`.

    Gradients flow to hidden rows, weight and bias.
    """
    tensors = (hidden, head.weight, head.bias)
    needed = tuple(t is not None and t.requires_grad for t in tensors)
    if torch.is_grad_enabled() and any(needed):
        return _TiledSum.apply(*tensors, head.dtype, labels, counted, divisor, smoothing, tiling)
    rows = Rows(labels[:, None], counted[:, None], smoothing)
    with torch.no_grad(), _no_autocast(hidden):
        return _total(losses_only(hidden, head, rows, tiling), counted, divisor)


class _TiledSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        labels: torch.Tensor,
        counted: torch.Tensor,
        divisor: torch.Tensor,
        smoothing: float,
        tiling: Tiling,
    ) -> torch.Tensor:
        # In float16 small gradients are zero: they stay large until a scaler's factor is known.
        late = dtype is torch.float16
        share = torch.ones_like(divisor) if late else divisor.reciprocal()
        weights = torch.where(counted, share, 0).to(softmax_dtype(dtype))
        rows = Rows(labels[:, None], weights[:, None], smoothing)
        with _no_autocast(hidden):
            losses, found = losses_and_gradients(
                hidden, Head(weight, bias, dtype), rows, tiling, ctx.needs_input_grad[:3]
            )
            ctx.save_for_backward(found.hidden, found.weight, found.bias, divisor if late else None)
            ctx.dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias)]
            return _total(losses, counted, divisor)

    @staticmethod
    def backward(ctx: Any, incoming: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise UsageError(
                "create_graph=True: a loss made in tiles can be differentiated only once",
                hint="use torch.nn.functional.cross_entropy where gradients have gradients",
            )
        *found, divisor = ctx.saved_tensors
        factor = incoming if divisor is None else incoming / divisor
        # The gradients are ours to overwrite, unless this backward may be run again.
        again = torch._C._autograd._get_current_graph_task_keep_graph()
        scaled = [
            None if gradient is None else _scaled(gradient, factor, dtype, again)
            for gradient, dtype in zip(found, ctx.dtypes, strict=True)
        ]
        return (*scaled, *[None] * 6)


def _scaled(
    gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, again: bool
) -> torch.Tensor:
    """Return the gradient times the factor, in the memory of the gradient if it may be."""
    wide = gradient.to(softmax_dtype(gradient.dtype))
    product = wide * factor if again and wide is gradient else wide.mul_(factor)
    return product.to(dtype)


def _total(losses: torch.Tensor, counted: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    return torch.where(counted, losses.squeeze(1), 0).sum() / divisor.to(losses.dtype)


def _no_autocast(tensor: torch.Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)
