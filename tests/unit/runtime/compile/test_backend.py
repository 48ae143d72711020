"""What inductor is told of a cut: enough to run it, too little to compile the same code twice."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from memfit.runtime.compile import backend
from memfit.runtime.compile.choice import Choice
from memfit.runtime.compile.compiled import CompiledSegments


class Squares(nn.Module):
    """The smallest segment with something to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sin().square()


def _partitioner(choice: Choice) -> Any:
    program = backend.Program(CompiledSegments("inductor"), Squares.forward, "Squares", choice)
    return backend._Partitioner(backend._Compilation(program))


def test_a_cut_is_the_same_setting_whatever_was_compiled_before() -> None:
    """Inductor's cache hashes the pickle of its settings: a counter there missed every time."""
    one, other = _partitioner(Choice(False)), _partitioner(Choice(False, "graph", ("mul",)))
    assert pickle.dumps(one) == pickle.dumps(other)
    assert copy.deepcopy(one) is one, "a copy must cut what it is asked to"


@pytest.mark.slow
def test_inductor_finds_the_code_of_an_earlier_compilation() -> None:
    for expected in (0, 2):  # both halves; other code was compiled between
        segments, hits = CompiledSegments("inductor"), _hits()
        x = torch.ones(2, 3, requires_grad=True)
        segments(Squares().forward, (x,), {}).sum().backward()
        assert _hits() - hits >= expected
        inputs = ["primals_1", "primals_2"]
        segments(Squares().forward, (x,), {}, key=segments.last_key, saved=inputs)
        segments.close()


def _hits() -> int:
    return int(counters["inductor"]["fxgraph_cache_hit"])
