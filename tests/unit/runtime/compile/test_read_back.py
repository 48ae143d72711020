"""Generated reductions wait for their own stores before they read them back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor.codegen.triton import TritonKernel

from memfit.runtime.compile.read_back import BARRIER, wait_before_reading_back


class Kernel:
    """The parts of a kernel that the generator's methods see."""

    def __init__(self, *stored: str) -> None:
        self.lines: list[str] = []
        self.cse = SimpleNamespace(invalidated_stores=set(stored))
        self.body = SimpleNamespace(writeline=self.lines.append)


@pytest.fixture(autouse=True)
def plain_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(kernel: Any, name: str, index: int) -> str:
        return f"{name}[{index}]"

    def write_loop(kernel: Any) -> None:
        kernel.lines.append("loop")

    monkeypatch.setattr(TritonKernel, "load", load)
    monkeypatch.setattr(TritonKernel, "codegen_body", write_loop)


def test_one_barrier_before_a_loop_that_reads_back() -> None:
    kernel: Any = Kernel("normalised", "scaled")
    with wait_before_reading_back():
        assert TritonKernel.load(kernel, "normalised", 3) == "normalised[3]"
        TritonKernel.load(kernel, "scaled", 3)
        TritonKernel.load(kernel, "weight", 3)
        TritonKernel.codegen_body(kernel)
        TritonKernel.load(kernel, "scaled", 3)
        TritonKernel.codegen_body(kernel)
    assert kernel.lines == [BARRIER, "loop", BARRIER, "loop"]


def test_no_barrier_without_reading_back() -> None:
    kernel: Any = Kernel("normalised")
    with wait_before_reading_back():
        TritonKernel.load(kernel, "weight", 3)
        TritonKernel.codegen_body(kernel)
    assert kernel.lines == ["loop"]


def test_the_generator_is_as_before_afterwards() -> None:
    before = TritonKernel.load, TritonKernel.codegen_body
    with pytest.raises(KeyError), wait_before_reading_back():
        raise KeyError
    assert (TritonKernel.load, TritonKernel.codegen_body) == before
