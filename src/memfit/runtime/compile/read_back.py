"""A barrier where fused code reads back what it stored in an earlier loop.

Inductor may write a tensor in one loop of a reduction and read it in the next, by other threads of
the same block, with nothing between that makes them wait (pytorch issue 190517): a layer norm that
hands over its normalised input gave other numbers in every run. This is the only module that
touches inductor's generator of Triton code. Releases that put the barrier in themselves get a
second one, which is harmless.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._inductor.codegen.triton import TritonKernel

BARRIER = "tl.debug_barrier()"


@contextmanager
def wait_before_reading_back() -> Iterator[None]:
    """Within, generated reductions wait for their own stores before they read them back."""
    load, write_loop = TritonKernel.load, TritonKernel.codegen_body
    waited: set[Any] = set()  # kernels with a barrier before the loop that is being made

    def wait_and_load(kernel: Any, name: str, *args: Any, **options: Any) -> Any:
        if name in kernel.cse.invalidated_stores and kernel not in waited:
            kernel.body.writeline(BARRIER)  # the loop follows when it is complete
            waited.add(kernel)
        return load(kernel, name, *args, **options)

    def write_noted_loop(kernel: Any) -> None:
        write_loop(kernel)
        waited.discard(kernel)

    with (
        mock.patch.object(TritonKernel, "load", wait_and_load),
        mock.patch.object(TritonKernel, "codegen_body", write_noted_loop),
    ):
        yield
