"""Forward, backward and step of one batch, by an optimizer that steps in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memfit.runtime.optimizer.in_backward.step_in_backward import StepInBackward
from memfit.runtime.same_forward import SameForward
from memfit.workload import Workload


def train(
    optimizer: StepInBackward,
    workload: Workload,
    batch: Any = None,
    *,
    last: bool = True,
    weigh: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss,
    clip_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    phase: Callable[[str], None] = lambda name: None,
) -> torch.Tensor:
    """Train on a batch (None: the example) and return its loss, detached; `weigh` is its share.

    Where it is not the `last` one of its step, gradients wait. Clipping and scaling look at all
    gradients before the first parameter steps: where none wait, that takes another forward and
    backward, so that none has to. `phase` is told of each "forward" and "backward".
    """
    same = None
    if last and looks_first(clip_norm, scaler) and not optimizer.waiting:
        same = SameForward(workload.model, workload.device)

    def forward() -> torch.Tensor:
        phase("forward")
        loss = workload.compute_loss(batch)
        phase("backward")
        return loss

    def again() -> torch.Tensor:
        assert same is not None
        with same.again():
            return weigh(forward())

    loss = forward()
    optimizer.backward(
        weigh(loss),
        last=last,
        clip_norm=clip_norm,
        scaler=scaler,
        again=None if same is None else again,
    )
    if last and scaler is not None:
        scaler.update()
    return loss.detach()


def looks_first(clip_norm: float | None, scaler: torch.amp.GradScaler | None) -> bool:
    """Whether all gradients must be known before the first parameter steps."""
    return clip_norm is not None or (scaler is not None and scaler.is_enabled())
