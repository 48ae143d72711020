"""The state of the random generators, taken and replayed cheaply."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from memfit.measure.host_random import HostState, host_state, set_host_state


@dataclass(frozen=True)
class RandomState:
    """States of the CPU generator and, as (seed, offset), of the CUDA devices in use; those of
    Python's and numpy's own generators, unless nobody draws from them."""

    cpu: torch.Tensor
    cuda: tuple[tuple[int, int, int], ...]
    host: HostState | None = None

    @staticmethod
    def of(devices: Iterable[torch.device], *, host: bool = True) -> RandomState:
        """Take the states of the CPU and of the CUDA devices among `devices`.

        What is captured as a CUDA graph draws no random numbers, and may not ask for states.
        """
        own = host_state() if host else None
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return RandomState(torch.get_rng_state(), (), own)
        indices = sorted({d.index for d in devices if d.type == "cuda" and d.index is not None})
        return RandomState(torch.get_rng_state(), tuple(_take(i) for i in indices), own)

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        for index, seed, offset in self.cuda:
            generator = torch.cuda.default_generators[index]
            if generator.initial_seed() != seed:
                generator.manual_seed(seed)
            generator.set_offset(offset)
        if self.host is not None:
            set_host_state(self.host)

    def same_as(self, other: RandomState) -> bool:
        """Whether both are one state: nothing was drawn between them."""
        same = self.cuda == other.cuda and self.host == other.host
        return same and torch.equal(self.cpu, other.cpu)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Run a block from these states, then go on from where the generators were."""
        cuda = tuple(_take(index) for index, _, _ in self.cuda)
        own = None if self.host is None else host_state()
        now = RandomState(torch.get_rng_state(), cuda, own)
        self.restore()
        try:
            yield
        finally:
            now.restore()


def _take(index: int) -> tuple[int, int, int]:
    generator = torch.cuda.default_generators[index]
    return index, generator.initial_seed(), generator.get_offset()
