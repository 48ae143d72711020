"""What is live, as far as Python can see it: by kind, each byte once, of tensors of any sort."""

from __future__ import annotations

import pytest
import torch

from memfit.measure.census import live_tensors

CPU = torch.device("cpu")


def test_tensors_that_are_known_have_kinds_of_their_own() -> None:
    before = live_tensors(CPU)[0]
    state = torch.ones(1000)
    kinds, largest = live_tensors(CPU, {"state": [state, state[:10]]})
    assert kinds["state"] == 4000
    assert kinds["other tensors"] == pytest.approx(before["other tensors"], abs=3000)
    big = torch.ones(500, 5000)
    assert "float32[500, 5000] (mine)" in live_tensors(CPU, {"mine": [big]})[1][0]
    assert len(largest) <= 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_memory_of_their_own_are_passed_over() -> None:
    """Counting them failed, in the place of the error that was to be explained."""
    seen: list[int] = []
    beside = torch.ones(1000)

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(live_tensors(CPU)[0]["other tensors"])
        return x

    torch.vmap(look)(torch.ones(3, 3))
    torch.func.functionalize(look)(torch.ones(3))
    if torch.backends.mkldnn.is_available():
        hidden = torch.ones(4, 4).to_mkldnn()
        look(hidden)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    look(nested)
    assert all(size >= beside.nbytes for size in seen) and len(seen) >= 3
