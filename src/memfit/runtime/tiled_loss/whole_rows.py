"""Operators on logits that leave every row whole, done to the rows that a head would take.

A row of logits comes from a row of the head's input. Where an operator only arranges rows, picks
some or gives all another dtype, the same can be done to the input, and the head come later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class HeadRows:
    """Inputs of a head: a row lies along dimension `classes`, where its logits will lie."""

    hidden: torch.Tensor
    classes: int

    @property
    def last(self) -> bool:
        """Whether rows lie along the last dimension."""
        return self.classes == self.hidden.dim() - 1

    def shape(self, vocab: int) -> tuple[int, ...]:
        """The shape of their logits."""
        sizes = list(self.hidden.shape)
        sizes[self.classes] = vocab
        return tuple(sizes)


class LogitsOf(Protocol):
    """Logits as the operators below see them."""

    rows: HeadRows
    call: Any
    shape: Any
    dtype: Any
    device: Any


Derived = tuple[HeadRows, torch.dtype] | None  # None: the operator does not leave rows whole
Operator = Callable[..., Any]
Keywords = Mapping[str, Any]


def _regrouped(
    logits: LogitsOf, operator: Operator, others: tuple[Any, ...], keywords: Keywords
) -> Derived:
    """Rows in other leading dimensions: view, flatten and their like."""
    plain = torch.empty(tuple(logits.shape), dtype=logits.dtype, device="meta")
    made = operator(plain, *others, **keywords)
    vocab, hidden = logits.shape[-1], logits.rows.hidden
    if not logits.rows.last or made.dtype != plain.dtype or made.shape[-1:] != (vocab,):
        return None
    regrouped = hidden.reshape(*made.shape[:-1], hidden.shape[-1])
    return HeadRows(regrouped, made.dim() - 1), logits.dtype


def _permuted(
    logits: LogitsOf, operator: Operator, others: tuple[Any, ...], keywords: Keywords
) -> Derived:
    """Dimensions in another order."""
    hidden, classes = logits.rows.hidden, logits.rows.classes
    marked = torch.empty([1 + (d == classes) for d in range(hidden.dim())], device="meta")
    moved = list(operator(marked, *others, **keywords).shape).index(2)
    return HeadRows(operator(hidden, *others, **keywords), moved), logits.dtype


def _picked(
    logits: LogitsOf, operator: Operator, others: tuple[Any, ...], keywords: Keywords
) -> Derived:
    """Some rows: indices of leading dimensions."""
    hidden, items = logits.rows.hidden, others[0]
    items = items if isinstance(items, tuple) else (items,)
    used = [_dimensions(item) for item in items]
    if not logits.rows.last or None in used:
        return None
    left = hidden.dim() - sum(n for n in used if n)
    reaches_classes = left == 0 or any(item is Ellipsis for item in items)
    if reaches_classes and items[-1] is not Ellipsis and not _is_everything(items[-1]):
        return None
    picked = operator(hidden, *others)
    return HeadRows(picked, picked.dim() - 1), logits.dtype


def _dimensions(item: Any) -> int | None:
    """How many dimensions an index takes; None when it is of no known kind."""
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, torch.Tensor):
        kinds = {torch.bool: item.dim(), torch.int64: 1, torch.int32: 1}
        return kinds.get(item.dtype)
    return 1 if isinstance(item, int | slice) and not isinstance(item, bool) else None


def _is_everything(item: Any) -> bool:
    return isinstance(item, slice) and item == slice(None)


def _cast(
    logits: LogitsOf, operator: Operator, others: tuple[Any, ...], keywords: Keywords
) -> Derived:
    """Another dtype: the head's own stays what it is, as the softmax is wide in any case."""
    made = operator(torch.empty(0, dtype=logits.dtype, device=logits.device), *others, **keywords)
    if not isinstance(made, torch.Tensor) or not made.is_floating_point():
        return None
    return (logits.rows, made.dtype) if made.device == logits.device else None


def _scaled(
    logits: LogitsOf, operator: Operator, others: tuple[Any, ...], keywords: Keywords
) -> Derived:
    """Times a number, which commutes with a head that has no bias."""
    number = len(others) == 1 and isinstance(others[0], int | float) and not keywords
    if logits.call.head.bias is not None or not number:
        return None
    return HeadRows(operator(logits.rows.hidden, *others), logits.rows.classes), logits.dtype


def _detached(
    logits: LogitsOf, operator: Operator, others: tuple[Any, ...], keywords: Keywords
) -> Derived:
    return HeadRows(logits.rows.hidden.detach(), logits.rows.classes), logits.dtype


WHOLE_ROWS: dict[str, Callable[..., Derived]] = {
    **dict.fromkeys(
        "view view_as reshape reshape_as flatten unflatten squeeze unsqueeze".split(), _regrouped
    ),
    **dict.fromkeys("transpose swapaxes swapdims permute movedim moveaxis".split(), _permuted),
    **dict.fromkeys("contiguous to type type_as float double half bfloat16".split(), _cast),
    **dict.fromkeys(
        "mul multiply div true_divide divide __mul__ __rmul__ __truediv__".split(), _scaled
    ),
    "__getitem__": _picked,
    "detach": _detached,
}
