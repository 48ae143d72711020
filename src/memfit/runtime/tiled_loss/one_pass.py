"""The loss and its gradients in one pass over tiles of rows.

The gradient of the logits is known as soon as the logits are, up to the factor that backward
brings, as in Liger Kernel's fused linear cross-entropy (https://arxiv.org/abs/2410.10989). So each
tile gives its share of the gradients at once and its logits are never wanted again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from memfit.measure.device import PRODUCT_GRAIN
from memfit.runtime.fused import Run, runner
from memfit.runtime.tiled_loss.softmax import row_gradients_, row_losses_, softmax_dtype
from memfit.runtime.tiled_loss.tiles import row_stride

_ADDS_WIDE = (8, 0)  # CUDA devices from here on add products of half precision to a float32 sum


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
        for part in self._parts():
            weight, some = self.weight[part].t(), logits[:, part]
            if self.bias is None:
                torch.mm(hidden, weight, out=some)
            else:
                torch.addmm(self.bias[part], hidden, weight, out=some)

    def write_hidden_gradient(self, logits: torch.Tensor, found: torch.Tensor) -> None:
        """Write the gradient of hidden rows, given that of their logits."""
        first, *others = self._parts()
        torch.mm(logits[:, first], self.weight[first], out=found)
        for part in others:
            found.addmm_(logits[:, part], self.weight[part])

    def add_weight_gradient(
        self, logits: torch.Tensor, hidden: torch.Tensor, found: torch.Tensor, most_elements: int
    ) -> None:
        """Add to the gradient of the weight, given that of the logits of the rows `hidden`."""
        for part in self._parts():
            _add_product_(found[part], logits[:, part].t(), hidden, most_elements)

    def _parts(self) -> list[slice]:
        """Columns whose products are taken together, the few odd ones first."""
        vocab = len(self.weight)
        even = vocab - _odd_columns(self.weight)
        return [part for part in (slice(even, vocab), slice(0, even)) if part.start < part.stop]


@dataclass(frozen=True)
class Rows:
    """What every row shall say: its label, how much it counts; (rows, 1) each."""

    labels: torch.Tensor
    weights: torch.Tensor
    smoothing: float

    def part(self, tile: slice, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels and weights of a tile, and zeros after them for `size` rows in all."""
        labels, weights = self.labels[tile], self.weights[tile]
        missing = size - len(labels)
        if missing:
            spare = (0, 0, 0, missing)
            labels, weights = F.pad(labels, spare), F.pad(weights, spare)
        return labels, weights


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
    with runner(tiling.compiled) as run:
        for tile in _tiles(len(hidden), tiling):
            inputs = hidden[tile].to(head.dtype)
            head.write_logits(inputs, logits[: len(inputs)])
            shown = _shown(logits, inputs, tiling)
            labels, _ = rows.part(tile, len(shown))
            losses.append(run(row_losses_, shown, labels, rows.smoothing)[: len(inputs)])
    return torch.cat(losses)


def losses_and_gradients(
    hidden: torch.Tensor, head: Head, rows: Rows, tiling: Tiling, needed: tuple[bool, bool, bool]
) -> tuple[torch.Tensor, Gradients]:
    """Return the loss of every row, and the gradients of hidden rows, weight and bias."""
    head = head.cast()
    found = Gradients.empty(hidden, head, needed)
    logits = _logits_of_a_tile(hidden, head, tiling)
    losses = [hidden.new_empty((0, 1), dtype=softmax_dtype(head.dtype))]
    with runner(tiling.compiled) as run:
        for tile in _tiles(len(hidden), tiling):
            inputs = hidden[tile].to(head.dtype)
            some = logits[: len(inputs)]
            head.write_logits(inputs, some)
            differentiated = _differentiate_(run, _shown(logits, inputs, tiling), rows, tile)
            losses.append(differentiated[: len(inputs)])
            if found.hidden is not None:
                head.write_hidden_gradient(some, found.hidden[tile])
            if found.weight is not None:
                head.add_weight_gradient(some, inputs, found.weight, logits.numel())
            if found.bias is not None:
                found.bias.add_(some.sum(0, dtype=found.bias.dtype))
    return torch.cat(losses), found


def _differentiate_(run: Run, logits: torch.Tensor, rows: Rows, tile: slice) -> torch.Tensor:
    """Turn the logits of a tile into their gradient; return the losses of its rows."""
    labels, weights = rows.part(tile, len(logits))
    losses, at_label = run(row_gradients_, logits, labels, weights, rows.smoothing)
    logits.scatter_(1, labels, at_label.to(logits.dtype))
    return losses


def _shown(logits: torch.Tensor, inputs: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """The logits of these rows; for compiled code always a whole tile, so that one shape does."""
    return logits if tiling.compiled else logits[: len(inputs)]


def _odd_columns(weight: torch.Tensor) -> int:
    """How many of the last columns of logits are computed apart."""
    return len(weight) % PRODUCT_GRAIN if weight.is_cuda else 0


def _add_product_(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, most_elements: int
) -> None:
    """Add `left @ right` to `total`, by way of no more than `most_elements` in a narrower dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
        return
    if total.is_cuda and torch.cuda.get_device_capability(total.device) >= _ADDS_WIDE:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
        return
    step = max(1, most_elements // right.shape[1])
    for part, some in zip(total.split(step), left.split(step), strict=True):
        part.add_(torch.mm(some, right))


def _logits_of_a_tile(hidden: torch.Tensor, head: Head, tiling: Tiling) -> torch.Tensor:
    """Room for the logits of a tile."""
    vocab = len(head.weight)
    # CUDA's matrix products are slow on rows that begin at odd places, the CPU's on spaced rows.
    stride = row_stride(vocab) if hidden.is_cuda else vocab
    shape = (min(tiling.rows, len(hidden)), stride)
    return hidden.new_empty(shape, dtype=head.dtype)[:, :vocab]


def _tiles(rows: int, tiling: Tiling) -> Iterator[slice]:
    for first in range(0, rows, tiling.rows):
        yield slice(first, min(first + tiling.rows, rows))
