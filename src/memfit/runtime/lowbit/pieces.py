"""A long tensor is worked on in pieces, so that what that needs does not grow with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from memfit.runtime.fused import Run, as_it_is, runner

PIECE = 2**20
# Where the arithmetic is compiled a piece needs less memory, and a call as long as many numbers.
COMPILED_PIECE = 2**22


@dataclass(frozen=True)
class Pieces:
    """How to run each piece. What is no multiple of the grain stays out of compiled code."""

    run: Run
    compiled: bool

    def of(self, elements: int, grain: int = 1) -> Iterator[tuple[Run, slice]]:
        """The pieces of so many elements, each with what runs it."""
        whole = elements // grain * grain
        size = piece_elements(compiled=self.compiled)
        for start in range(0, whole, size):
            yield self.run, slice(start, min(start + size, whole))
        if whole < elements:
            yield as_it_is, slice(whole, elements)


@contextmanager
def pieces(compiled: bool) -> Iterator[Pieces]:
    """For many tensors: entering takes as long as some of them."""
    with torch.no_grad(), runner(compiled, dynamic=True) as run:

        def unattached(function: Callable[..., object], *inputs: torch.Tensor) -> object:
            # A view would have the code depend on the shape of what it is a view of.
            return run(function, *(tensor.data for tensor in inputs))

        yield Pieces(unattached if compiled else run, compiled)


def piece_elements(*, compiled: bool) -> int:
    """The most elements of a piece."""
    return COMPILED_PIECE if compiled else PIECE
