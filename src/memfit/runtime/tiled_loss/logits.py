"""What a head returns while its loss is made in tiles: a tensor that stands for its logits.

It has the shape and the dtype of the logits, and behind them only the head's input. What leaves
every row whole gives another one; F.cross_entropy of one is made in tiles; all else is refused, as
it would need the logits. A tensor class of its own, so there is nothing to switch on and off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from memfit.errors import UsageError
from memfit.runtime.tiled_loss.cross_entropy import logits_dtype, tiled_cross_entropy
from memfit.runtime.tiled_loss.whole_rows import WHOLE_ROWS, HeadRows

_Tensor = torch.Tensor
_HINT = (
    "give the logits to torch.nn.functional.cross_entropy as they are, look at them under "
    "torch.no_grad(), compute the loss yourself with memfit.tiled_cross_entropy(hidden, weight, "
    "labels), or leave tiled_loss out"
)
_FACTS = {
    "__get__",
    "__len__",
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "nelement",
    "numel",
    "size",
    "stride",
}
# Logits are no part of the graph, and have no memory: for both see the head's input.
_FACTS_OF_HIDDEN = {
    _Tensor.data_ptr,
    _Tensor.register_hook,
    _Tensor.untyped_storage,
    *(getattr(_Tensor, n).__get__ for n in ("_version", "grad_fn", "is_leaf", "requires_grad")),
}


@dataclass(frozen=True)
class HeadCall:
    """A call of the linear layer `head`, and how the loss of its logits is cut into tiles."""

    head: torch.nn.Linear
    name: str
    tiling: Mapping[str, Any]
    autocast: torch.dtype | None  # as it was at the call: the loss may lie elsewhere

    def logits(self, hidden: torch.Tensor) -> Logits:
        """What stands for the logits of `hidden`."""
        dtype = logits_dtype(hidden, self.head.weight, self.head.bias)
        # A view, so that hooks on the logits are not hooks on the input.
        return Logits(self, HeadRows(hidden.view_as(hidden), hidden.dim() - 1), dtype)

    def loss(self, rows: HeadRows, labels: torch.Tensor, **choices: Any) -> torch.Tensor:
        """The cross-entropy of the logits of `rows`."""
        kind = rows.hidden.device.type
        with torch.autocast(kind, self.autocast, enabled=self.autocast is not None):
            return tiled_cross_entropy(
                rows.hidden.movedim(rows.classes, -1),
                self.head.weight,
                labels,
                bias=self.head.bias,
                **choices,
                **self.tiling,
            )

    def refusal(self, what: str) -> UsageError:
        """The error that says why these logits cannot be made in tiles."""
        head = f"its head {self.name!r}" if self.name else "it"
        return UsageError(
            f"the loss of the model cannot be made in tiles: {head} makes logits, and {what}",
            hint=_HINT,
        )


class Logits(torch.Tensor):
    """Stands for the logits of `rows`."""

    call: HeadCall
    rows: HeadRows

    @staticmethod
    def __new__(cls, call: HeadCall, rows: HeadRows, dtype: torch.dtype) -> Logits:
        made: Logits = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, rows.shape(call.head.out_features), dtype=dtype, device=rows.hidden.device
        )
        made.call, made.rows = call, rows
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Logits({tuple(self.shape)}, {self.dtype}, of {self.call.name!r}, made in tiles)"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        refuse_tracing()
        kwargs = kwargs or {}
        logits = args[0] if args else kwargs.get("input")
        name = getattr(func, "__name__", str(func))
        if not isinstance(logits, Logits):
            raise _some(args, kwargs).call.refusal(f"{name!r} is done to them")
        if func is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if func in _FACTS_OF_HIDDEN:
            return func(logits.rows.hidden, *args[1:], **kwargs)
        if name in _FACTS and func != _Tensor.data.__get__:  # type: ignore[attr-defined]
            return super().__torch_function__(func, types, args, kwargs)
        if func is _Tensor.requires_grad_:
            logits.rows.hidden.requires_grad_(*args[1:], **kwargs)
            return logits
        found = WHOLE_ROWS.get(name)
        derived = found and found(logits, func, args[1:], kwargs)
        if not derived:
            raise logits.call.refusal(f"{name!r} is done to them")
        return Logits(logits.call, *derived)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Only for what torch does by itself: it detaches what it keeps for backward."""
        logits = _some(args, kwargs or {})
        if func is not torch.ops.aten.detach.default:
            raise logits.call.refusal(f"{str(func)!r} is done to them")
        hidden = logits.rows.hidden
        kept = hidden.detach().requires_grad_(hidden.requires_grad)
        return Logits(logits.call, HeadRows(kept, logits.rows.classes), logits.dtype)


def refuse_tracing() -> None:
    """Keep segments that hold the head or the loss out of compiled code; they run as they are."""
    if torch.compiler.is_compiling():
        raise NotImplementedError("its loss is made in tiles, outside of compiled code")


def _cross_entropy(
    input: Logits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """What F.cross_entropy returns."""
    if weight is not None:
        raise input.call.refusal("cross_entropy weighs their classes")
    if size_average is not None or reduce is not None:
        raise input.call.refusal("cross_entropy is given size_average or reduce: use reduction")
    if input.rows.classes != 1:
        shape = tuple(input.shape)
        raise input.call.refusal(f"in {shape} classes are not where cross_entropy wants them")
    loss = input.call.loss(
        input.rows,
        target,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    wide = torch.is_autocast_enabled(input.device.type)
    return loss if wide else loss.to(input.dtype)


def _some(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Logits:
    """A stand-in among the arguments."""
    leaves = tree_leaves((args, dict(kwargs)))
    return next(leaf for leaf in leaves if isinstance(leaf, Logits))
