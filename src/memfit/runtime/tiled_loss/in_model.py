"""Head and loss in tiles inside a model as it is, whoever computes the loss."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from memfit.errors import UsageError
from memfit.runtime.calls import Forward, replaced_forward
from memfit.runtime.reversible import Stacked
from memfit.runtime.tiled_loss.logits import HeadCall, refuse_tracing
from memfit.workload import refuse_compiled, unwrap

_HINT = (
    "compute the loss yourself with memfit.tiled_cross_entropy(hidden, weight, labels), "
    "or leave tiled_loss out"
)


class TiledLoss(Stacked):
    """A model whose cross-entropy is made in tiles; its logits are never made (see `logits`).

    The loss may be computed in the model or outside. While gradients are disabled the head gives
    real logits. A context manager: leaving it restores the model. Parameters, hooks and state_dict
    stay as they are throughout. The head's weight is read when the loss is made, after its call.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tile: int | None = None,
        tile_bytes: int | None = None,
        compiled: bool | None = None,
    ) -> None:
        """`tile`, `tile_bytes` and `compiled` as in tiled_cross_entropy."""
        refuse_compiled(model)
        self.model = unwrap(model)
        self.name, self.head = find_head(self.model)
        self._tiling = {"tile": tile, "tile_bytes": tile_bytes, "compiled": compiled}

    def _make(self, stack: ExitStack) -> None:
        stack.enter_context(replaced_forward(self.head, self._put_off))

    def _put_off(self, forward: Forward) -> Forward:
        def call(input: torch.Tensor) -> torch.Tensor:
            if not torch.is_grad_enabled():
                return forward(input)
            refuse_tracing()
            kind = input.device.type
            autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            return HeadCall(self.head, self.name, self._tiling, autocast).logits(input)

        return call


def find_head(model: nn.Module) -> tuple[str, nn.Linear]:
    """The layer that makes a model's logits, and its name; UsageError when there is none.

    The one that a transformers model says it is, else the linear layer registered last.
    """
    find = getattr(model, "get_output_embeddings", None)
    said = find() if callable(find) else None
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    head: Any = said if said is not None else linear[-1] if linear else None
    if head is None:
        raise _refusal(model, "has no linear layer that could be its head")
    changed = getattr(head.forward, "__func__", None) is not nn.Linear.forward
    if changed or not isinstance(head, nn.Linear):
        raise _refusal(model, f"has the head {type(head).__name__}, which is no plain linear layer")
    if head._backward_hooks or head._backward_pre_hooks:
        raise _refusal(model, "has hooks that ask for the gradient of its logits")
    return next(name for name, module in model.named_modules() if module is head), head


def _refusal(model: nn.Module, reason: str) -> UsageError:
    return UsageError(
        f"the loss of {type(model).__name__} cannot be made in tiles: it {reason}", hint=_HINT
    )
