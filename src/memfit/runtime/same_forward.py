"""The same forward twice: from the random numbers and the buffers that the first one began with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memfit.runtime.random_state import RandomState


class SameForward:
    """What a forward begins with; made before it.

    A forward `again` leaves random numbers and buffers where the first one did, so that statistics
    are counted once. Buffers are copied: they are small beside activations.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._random = RandomState.of([device])
        self._buffers = [
            (module._buffers, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run a block from where the first forward began."""
        with torch.no_grad():
            for buffers, name, buffer, value in self._buffers:
                buffers[name] = buffer.copy_(value)
        with self._random.replayed():
            yield
