"""What a training step is given beside its batch, checked before anything runs."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch

from memfit.errors import UsageError

_SCALER = ("scale", "unscale_", "step", "update")


def check_step_options(clip_norm: Any, scaler: Any, scheduler: Any) -> None:
    """Raise UsageError for a norm, a scaler or a scheduler that is none."""
    number = isinstance(clip_norm, Real) and not isinstance(clip_norm, bool)
    if not (clip_norm is None or number or isinstance(clip_norm, torch.Tensor)):
        raise UsageError(f"clip_norm is {clip_norm!r}", hint="a number, such as 1.0, or None")
    if number and not clip_norm >= 0:
        raise UsageError(
            f"clip_norm is {clip_norm}", hint="the largest norm of all gradients: 0 or more"
        )
    if scaler is not None and not all(hasattr(scaler, name) for name in _SCALER):
        raise UsageError(
            f"scaler is a {type(scaler).__name__}, which scales no gradients",
            hint="give a torch.amp.GradScaler, or leave it out",
        )
    if scheduler is not None and not hasattr(scheduler, "step"):
        raise UsageError(
            f"scheduler is a {type(scheduler).__name__}, which has no step()",
            hint="give one of torch.optim.lr_scheduler, or leave it out",
        )
