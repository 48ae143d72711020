"""Linear head and cross-entropy without the full logits."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import torch
from torch.nn import functional as F

from memfit.errors import UsageError
from memfit.runtime.tiled_loss.function import tiled_sum
from memfit.runtime.tiled_loss.one_pass import Head, Tiling
from memfit.runtime.tiled_loss.softmax import softmax_dtype
from memfit.runtime.tiled_loss.tiles import TILE_BYTES, rows_per_tile

_WHOLE = (torch.int32, torch.int16, torch.int8, torch.uint8)


def tiled_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    num_items: int | torch.Tensor | None = None,
    shift: bool = False,
    tile: int | None = None,
    tile_bytes: int | None = None,
    compiled: bool | None = None,
) -> torch.Tensor:
    """Return the cross-entropy of the logits `hidden @ weight.T + bias`, made tile by tile.

    Each tile gives its share of the gradients at once, so only `tile` rows of logits ever exist
    (default: as many as take `tile_bytes`). The logits have the dtype that a linear layer would
    give them, autocast included; the softmax and the loss are float32, or float64 for those.

    `shift` lets each position predict the next one's label. `num_items` divides the sum of the
    losses in place of the count of labels that are not ignored. `compiled` compiles the maths of a
    tile (default: on CUDA).
    """
    _check_tensors(hidden=hidden, weight=weight, labels=labels, bias=bias)
    dtype = logits_dtype(hidden, weight, bias)
    _check_shapes(hidden, weight, labels, bias)
    _check_choices(label_smoothing, reduction, num_items, tile, tile_bytes)
    if shift:
        labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    flat, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    counted = labels != ignore_index
    compiled = hidden.is_cuda if compiled is None else compiled
    if tile is None:
        size = TILE_BYTES if tile_bytes is None else tile_bytes
        tile = rows_per_tile(len(flat), len(weight), dtype, tile_bytes=size, compiled=compiled)
    classes = torch.where(counted, labels, 0)
    try:
        return tiled_sum(
            flat,
            Head(weight, bias, dtype),
            classes,
            counted,
            _divisor(counted, reduction, num_items, softmax_dtype(dtype)),
            label_smoothing,
            Tiling(tile, compiled),
        )
    except (RuntimeError, IndexError) as error:
        _refuse_labels(classes, len(weight), ignore_index, error)
        raise


def _divisor(
    counted: torch.Tensor,
    reduction: str,
    num_items: int | torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    if isinstance(num_items, torch.Tensor):
        return num_items.to(counted.device, dtype)
    if num_items is not None:
        return torch.full((), num_items, device=counted.device, dtype=dtype)
    if reduction == "sum":
        return torch.ones((), device=counted.device, dtype=dtype)
    return counted.sum().to(dtype)


def logits_dtype(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.dtype:
    """The dtype a linear layer would give its output here."""
    parts = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    wrong = [f"{name} is {t.dtype}" for name, t in parts.items() if not t.is_floating_point()]
    if wrong:
        raise UsageError(f"{wrong[0]}, not floating point", hint="give the head's own tensors")
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and torch.float64 not in (t.dtype for t in parts.values()):
        return torch.get_autocast_dtype(kind)
    if len({t.dtype for t in parts.values()}) > 1:
        raise UsageError(
            f"the dtypes differ: {', '.join(f'{n} {t.dtype}' for n, t in parts.items())}",
            hint="convert them to one, or run the model and the loss under torch.autocast",
        )
    return hidden.dtype


def _check_tensors(**given: torch.Tensor | None) -> None:
    for name, value in given.items():
        if not isinstance(value, torch.Tensor) and (value is not None or name != "bias"):
            raise UsageError(
                f"{name} is a {type(value).__name__}, not a tensor",
                hint="call tiled_cross_entropy(hidden, weight, labels) with the head's own tensors",
            )


def _refuse_labels(classes: torch.Tensor, count: int, ignore_index: int, error: Exception) -> None:
    """Raise UsageError where a label is no class, once the loss has failed: a look takes time.

    Not on CUDA, where nothing can be looked at after such an error, nor at fake tensors.
    """
    if type(classes) is not torch.Tensor or classes.device.type != "cpu":
        return
    wrong = classes[(classes < 0) | (classes >= count)]
    if len(wrong):
        raise UsageError(
            f"{len(wrong)} of {len(classes)} labels are no class of a weight of {count} rows: the "
            f"first is {int(wrong[0])}",
            hint=f"labels are 0 to {count - 1}, or {ignore_index} (ignore_index) to be left out",
        ) from error


def _check_shapes(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None
) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise UsageError(
            f"hidden of shape {tuple(hidden.shape)} does not meet a weight of shape "
            f"{tuple(weight.shape)}",
            hint="hidden is (..., width), weight (vocabulary, width) as in torch.nn.Linear",
        )
    if labels.shape != hidden.shape[:-1]:
        raise UsageError(
            f"labels of shape {tuple(labels.shape)} for hidden of shape {tuple(hidden.shape)}: "
            "there must be one label for each row",
            hint="leave labels and hidden uncut and pass shift=True to predict the next label",
        )
    if labels.dtype in _WHOLE:
        raise UsageError(
            f"labels are {labels.dtype}, not torch.int64, as torch's own loss wants them",
            hint="give labels.long()",
        )
    if labels.dtype is not torch.int64:
        raise UsageError(
            f"labels are {labels.dtype}, not torch.int64",
            hint="give class numbers: probabilities as labels need the full logits "
            "(torch.nn.functional.cross_entropy)",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UsageError(
            f"bias of shape {tuple(bias.shape)} for {len(weight)} classes",
            hint="bias has one number for each row of weight",
        )


def _check_choices(
    label_smoothing: float,
    reduction: str,
    num_items: int | torch.Tensor | None,
    tile: int | None,
    tile_bytes: int | None,
) -> None:
    if not 0.0 <= label_smoothing <= 1.0:
        raise UsageError(f"label_smoothing is {label_smoothing}", hint="it lies between 0 and 1")
    if reduction not in ("mean", "sum"):
        raise UsageError(
            f"reduction is {reduction!r}, not 'mean' or 'sum'",
            hint="a loss of each row needs the full logits: use torch.nn.functional.cross_entropy",
        )
    if num_items is not None and reduction != "mean":
        raise UsageError(
            f"num_items says what the mean is over, but reduction is {reduction!r}",
            hint="leave one of them out",
        )
    if tile is not None and tile_bytes is not None:
        raise UsageError(
            f"tile={tile} rows and tile_bytes={tile_bytes} are both given",
            hint="leave one of them out",
        )
    _check_counts(num_items, tile)
    if tile is not None and tile < 1:
        raise UsageError(f"tile is {tile} rows", hint="a tile has one row at least")


def _check_counts(num_items: Any, tile: Any) -> None:
    """Refuse what counts nothing; a tensor is not looked at, which would wait for the device."""
    counts = isinstance(num_items, (Real, torch.Tensor)) and not isinstance(num_items, bool)
    if num_items is not None and not counts:
        raise UsageError(f"num_items is {num_items!r}", hint="it counts labels: a number")
    if isinstance(num_items, Real) and not float(num_items) > 0:
        raise UsageError(
            f"num_items is {num_items}: the losses are divided by it",
            hint="it counts labels, in all batches of a step: 1 or more",
        )
    if tile is not None and (isinstance(tile, bool) or not isinstance(tile, Integral)):
        raise UsageError(f"tile is {tile!r} rows", hint="it counts rows: a whole number")
