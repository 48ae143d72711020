"""A GradScaler's share of a step whose gradients are never there all at once.

The only file that touches the scaler's private state: torch has no public way to tell it what was
found in gradients that are gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.amp.grad_scaler import OptState

from memfit.runtime.optimizer.accepted import Parameters


class Scaling:
    """Unscales gradients part by part, exactly as the scaler does for all of them.

    `in_kernel` is for fused optimizers, which divide by the scale themselves.
    """

    def __init__(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, in_kernel: bool
    ) -> None:
        self._scaler = cast(Any, scaler)
        self._optimizer = cast(Any, optimizer)
        self._in_kernel = in_kernel
        self._scale: torch.Tensor = self._scaler._scale
        self._inverse = self._scale.double().reciprocal().float()
        self._found = torch.zeros((), dtype=torch.float32, device=self._scale.device)

    def unscale_(self, parameters: Parameters) -> None:
        """Unscale gradients and remember whether one of them is not finite."""
        wanted = SimpleNamespace(param_groups=[{"params": parameters}])
        none = torch.zeros_like(self._found)
        found = self._scaler._unscale_grads_(wanted, self._inverse, none, self._in_kernel)
        for one in found.values():
            torch.maximum(self._found, one.to(self._found.device), out=self._found)

    def prepare(self, parameters: Parameters) -> None:
        """Make gradients ready for the optimizer."""
        if not self._in_kernel:
            self.unscale_(parameters)

    def conclude(self) -> bool:
        """Tell the scaler what was found, for its update(); whether all gradients were finite."""
        state = self._scaler._per_optimizer_states[id(self._optimizer)]
        state["found_inf_per_device"] = {self._found.device: self._found}
        state["stage"] = OptState.STEPPED
        return not self._found.item()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Give a fused optimizer its scale."""
        if not self._in_kernel:
            yield
            return
        self._optimizer.grad_scale, self._optimizer.found_inf = self._scale, self._found
        try:
            yield
        finally:
            del self._optimizer.grad_scale, self._optimizer.found_inf
