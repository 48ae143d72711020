"""The loss and its gradients in one pass over tiles of rows.

The gradient of the logits is known as soon as the logits are, up to the factor that backward
brings, as in Liger Kernel's fused linear cross-entropy (https://arxiv.org/abs/2410.10989). So each
tile gives its share of the gradients at once and its logits are never wanted again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from memfit.runtime.tiled_loss.softmax import row_losses_, row_maths, softmax_dtype


@dataclass(frozen=True)
class Head:
    """A linear head whose logits are of `dtype`."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype

    def cast(self) -> Head:
        """The same with parameters of the logits' dtype."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return Head(self.weight.to(self.dtype), bias, self.dtype)

    def write_logits(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Write the logits of the rows `hidden`."""
        if self.bias is None:
            torch.mm(hidden, self.weight.t(), out=logits)
        else:
            torch.addmm(self.bias, hidden, self.weight.t(), out=logits)


@dataclass(frozen=True)
class Rows:
    """What every row shall say: its label, how much it counts; (rows, 1) each."""

    labels: torch.Tensor
    weights: torch.Tensor
    smoothing: float


@dataclass(frozen=True)
class Tiling:
    """How the rows are cut, and whether the maths of a tile is compiled."""

    rows: int
    compiled: bool


@dataclass(frozen=True)
class Gradients:
    """Gradients of the inputs that need one, the parameters' summed up in float32 or wider."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    @classmethod
    def empty(cls, hidden: torch.Tensor, head: Head, needed: tuple[bool, bool, bool]) -> Gradients:
        """Room for the needed ones."""
        wide = softmax_dtype(head.dtype)
        of_hidden, of_weight, of_bias = needed
        return cls(
            torch.empty_like(hidden, dtype=head.dtype) if of_hidden else None,
            torch.zeros_like(head.weight, dtype=wide) if of_weight else None,
            torch.zeros_like(head.bias, dtype=wide) if of_bias and head.bias is not None else None,
        )


def losses_only(hidden: torch.Tensor, head: Head, rows: Rows, tiling: Tiling) -> torch.Tensor:
    """Return the loss of every row."""
    head = head.cast()
    logits = _logits_of_a_tile(hidden, head, tiling)
    losses = [hidden.new_empty((0, 1), dtype=softmax_dtype(head.dtype))]
    for tile in _tiles(len(hidden), tiling):
        some = logits[: tile.stop - tile.start]
        head.write_logits(hidden[tile].to(head.dtype), some)
        losses.append(row_losses_(some, rows.labels[tile], rows.smoothing))
    return torch.cat(losses)


def losses_and_gradients(
    hidden: torch.Tensor, head: Head, rows: Rows, tiling: Tiling, needed: tuple[bool, bool, bool]
) -> tuple[torch.Tensor, Gradients]:
    """Return the loss of every row, and the gradients of hidden rows, weight and bias."""
    head = head.cast()
    found = Gradients.empty(hidden, head, needed)
    logits = _logits_of_a_tile(hidden, head, tiling)
    losses = [hidden.new_empty((0, 1), dtype=softmax_dtype(head.dtype))]
    for tile in _tiles(len(hidden), tiling):
        inputs = hidden[tile].to(head.dtype)
        some = logits[: len(inputs)]
        head.write_logits(inputs, some)
        losses.append(_differentiate_(logits, rows, tile, tiling.compiled))
        if found.hidden is not None:
            torch.mm(some, head.weight, out=found.hidden[tile])
        if found.weight is not None:
            _add_product_(found.weight, some.t(), inputs, logits.numel())
        if found.bias is not None:
            found.bias.add_(some.sum(0, dtype=found.bias.dtype))
    return torch.cat(losses), found


def _differentiate_(logits: torch.Tensor, rows: Rows, tile: slice, compiled: bool) -> torch.Tensor:
    """Turn the logits of a tile into their gradient; return the losses of its rows."""
    count = tile.stop - tile.start
    labels, weights = rows.labels[tile], rows.weights[tile]
    if compiled and count < len(logits):  # the last tile: whole, so that one shape is compiled
        spare = (0, 0, 0, len(logits) - count)
        labels, weights = (torch.nn.functional.pad(t, spare) for t in (labels, weights))
    elif count < len(logits):
        logits = logits[:count]
    losses, at_label = row_maths(compiled)(logits, labels, weights, rows.smoothing)
    logits.scatter_(1, labels, at_label.to(logits.dtype))
    return losses[:count]


def _add_product_(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, most_elements: int
) -> None:
    """Add `left @ right` to `total`, by way of no more than `most_elements` in a narrower dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
        return
    step = max(1, most_elements // right.shape[1])
    for part, some in zip(total.split(step), left.split(step), strict=True):
        part.add_(torch.mm(some, right))


def _logits_of_a_tile(hidden: torch.Tensor, head: Head, tiling: Tiling) -> torch.Tensor:
    shape = (min(tiling.rows, len(hidden)), len(head.weight))
    return hidden.new_empty(shape, dtype=head.dtype)


def _tiles(rows: int, tiling: Tiling) -> Iterator[slice]:
    for first in range(0, rows, tiling.rows):
        yield slice(first, min(first + tiling.rows, rows))
