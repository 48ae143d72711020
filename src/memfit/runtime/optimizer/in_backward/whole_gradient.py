"""What clipping and a scaler must know of all gradients before the first of them is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from memfit.runtime.optimizer.accepted import Parameters
from memfit.runtime.optimizer.in_backward.scaling import Scaling


class WholeGradient:
    """Looks at gradients in a first pass and prepares them for the optimizer in a second.

    Both are exactly what GradScaler and clip_grad_norm_ do to all gradients at once: the norm is
    that of the parameters' norms in the order of `clipped`.
    """

    def __init__(
        self, clipped: Parameters, clip_norm: float | None, scaling: Scaling | None
    ) -> None:
        self._clipped, self._clip_norm, self._scaling = clipped, clip_norm, scaling
        self._wanted = {id(p) for p in clipped}
        self._norms: dict[int, torch.Tensor] = {}
        self.norm: torch.Tensor | None = None

    def look(self, parameters: Parameters) -> None:
        """Take what is needed of the gradients there are; they may be dropped afterwards."""
        present = [p for p in parameters if p.grad is not None]
        if not present:
            return
        if self._scaling is not None:
            self._scaling.unscale_(present)
        counted = [p for p in present if id(p) in self._wanted]
        if self._clip_norm is not None and counted:
            norms = torch._foreach_norm([p.grad for p in counted if p.grad is not None])
            self._norms.update((id(p), n) for p, n in zip(counted, norms, strict=True))

    def conclude(self) -> bool:
        """End the first pass; whether the second may step."""
        if self._clip_norm is not None:
            self.norm = _norm_of_norms(
                [self._norms[id(p)] for p in self._clipped if id(p) in self._norms]
            )
        return self._scaling is None or self._scaling.conclude()

    def prepare(self, parameters: Parameters) -> None:
        """Unscale and clip gradients."""
        if self._scaling is not None:
            self._scaling.prepare(parameters)
        if self.norm is not None and self._clip_norm is not None:
            counted = [p for p in parameters if id(p) in self._wanted]
            torch.nn.utils.clip_grads_with_norm_(counted, self._clip_norm, self.norm)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The second pass."""
        if self._scaling is None:
            yield
        else:
            with self._scaling.at_work():
                yield


def _norm_of_norms(norms: list[torch.Tensor]) -> torch.Tensor:
    if not norms:
        return torch.tensor(0.0)
    # clip_grad_norm_ sorts gradients by dtype with this function, which decides the rounding.
    grouped: dict[Any, Any] = _group_tensors_by_device_and_dtype([[*norms]])
    ordered = [n.to(norms[0].device) for lists, _ in grouped.values() for n in lists[0]]
    return torch.linalg.vector_norm(torch.stack(ordered), 2.0)
