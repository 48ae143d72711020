"""Random states, taken and replayed."""

from __future__ import annotations

import pytest
import torch

from memfit.runtime.random_state import RandomState


def test_a_replay_repeats_and_then_goes_on() -> None:
    torch.manual_seed(1)
    state = RandomState.of([torch.device("cpu")])
    first, second = torch.rand(3), torch.rand(3)
    state.restore()
    assert torch.equal(torch.rand(3), first)
    with state.replayed():
        assert torch.equal(torch.rand(3), first)
        torch.rand(100)
    assert torch.equal(torch.rand(3), second)


def test_an_exception_in_a_replay_goes_on_too() -> None:
    state = RandomState.of([])
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="mine"), state.replayed():
        torch.rand(3)
        raise ValueError("mine")
    assert torch.equal(torch.get_rng_state(), before)
