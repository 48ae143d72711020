"""Copies of a workload's tensors, from which it is restored after a measurement.

They lie in host memory, whose first use is slow: the system clears page after page. So within
`reused()` a copy that is no longer needed gives its memory to the next one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_Kind = tuple[torch.Size, torch.dtype]
_spare: dict[_Kind, list[torch.Tensor]] | None = None


@contextmanager
def reused() -> Iterator[None]:
    """Within it, memory of host copies is used again; it is free when the outermost one is left."""
    global _spare
    if _spare is not None:
        yield
        return
    _spare = defaultdict(list)
    try:
        yield
    finally:
        _spare = None


def fresh(source: torch.Tensor) -> torch.Tensor:
    """Host memory for a copy, cleared if that comes from a device.

    Such a copy is made by one thread, which would wait for page after page; all threads clear.
    """
    made = torch.empty(source.shape, dtype=source.dtype)
    return made.zero_() if source.is_cuda else made


class Copies:
    """Where copies are made: in host memory, or on the tensors' own device."""

    def __init__(self, on_device: bool = False) -> None:
        self.on_device = on_device
        self._lent: list[torch.Tensor] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the whole tensor, detached; expanded ones keep their values, not strides."""
        source = tensor.detach()
        if self.on_device:
            return source.clone()
        kept = _spare
        if kept is None or source.layout is not torch.strided:
            return source.to("cpu", copy=True)
        spare = kept[source.shape, source.dtype]
        copy = spare.pop() if spare else fresh(source)
        self._lent.append(copy)
        return copy.copy_(source)

    def release(self) -> None:
        """Say that no copy is needed any more."""
        lent, self._lent = self._lent, []
        if self.on_device:
            torch.cuda.empty_cache()  # what follows may be measured
        kept = _spare
        if kept is not None:
            for copy in lent:
                kept[copy.shape, copy.dtype].append(copy)
