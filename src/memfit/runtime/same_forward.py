"""The same forward twice: from the random numbers, buffers and counters that the first one had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memfit.measure.counters import as_they_were, numbers_of
from memfit.runtime.random_state import RandomState


class SameForward:
    """What a forward begins with; made before it.

    A forward `again` leaves all of it where the first one did, so that statistics are counted once.
    Buffers are copied: they are small beside activations.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._random = RandomState.of([device])
        self._numbers = numbers_of(model)
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
        with self._random.replayed(), as_they_were(self._numbers):
            yield
