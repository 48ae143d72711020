"""The loss of a tile's rows, and the gradient of its logits in their place."""

from __future__ import annotations

import torch


def softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which logits of `dtype` are summed: float32, or float64 for their own kind."""
    return torch.promote_types(dtype, torch.float32)


def row_losses_(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return the loss of every row; `logits` are overwritten where they need no other dtype."""
    return _exponentials(logits, labels, smoothing)[0]


def row_gradients_(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of every row and the gradient at its label.

    `logits` become the gradient everywhere else. `weights` say how much each row counts.
    """
    losses, at_label, powers, total = _exponentials(logits, labels, smoothing)
    spread = smoothing / logits.shape[1]
    powers.mul_(weights / total)
    if smoothing:
        powers.sub_(weights * spread)
    logits.copy_(powers)
    return losses, weights * (at_label.exp() / total - (1 - smoothing) - spread)


def _exponentials(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    powers = logits.to(softmax_dtype(logits.dtype))
    powers.sub_(powers.amax(1, keepdim=True))
    at_label = powers.gather(1, labels)
    losses = at_label * (smoothing - 1)
    if smoothing:
        losses.sub_(powers.mean(1, keepdim=True), alpha=smoothing)
    powers.exp_()
    total = powers.sum(1, keepdim=True)
    return losses.add_(total.log()), at_label, powers, total
