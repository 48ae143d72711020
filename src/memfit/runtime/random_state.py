"""The state of the random generators, taken and replayed cheaply."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RandomState:
    """States of the CPU generator and, as (seed, offset), of the CUDA devices in use."""

    cpu: torch.Tensor
    cuda: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(devices: Iterable[torch.device]) -> RandomState:
        """Take the states of the CPU and of the CUDA devices among `devices`.

        What is captured as a CUDA graph draws no random numbers, and may not ask for states.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return RandomState(torch.get_rng_state(), ())
        indices = sorted({d.index for d in devices if d.type == "cuda" and d.index is not None})
        return RandomState(torch.get_rng_state(), tuple(_take(i) for i in indices))

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        for index, seed, offset in self.cuda:
            generator = torch.cuda.default_generators[index]
            if generator.initial_seed() != seed:
                generator.manual_seed(seed)
            generator.set_offset(offset)

    def same_as(self, other: RandomState) -> bool:
        """Whether both are one state: nothing was drawn between them."""
        return self.cuda == other.cuda and torch.equal(self.cpu, other.cpu)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Run a block from these states, then go on from where the generators were."""
        now = RandomState(torch.get_rng_state(), tuple(_take(index) for index, _, _ in self.cuda))
        self.restore()
        try:
            yield
        finally:
            now.restore()


def _take(index: int) -> tuple[int, int, int]:
    generator = torch.cuda.default_generators[index]
    return index, generator.initial_seed(), generator.get_offset()
