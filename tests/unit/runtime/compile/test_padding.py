"""What inductor pads is decided once, and goes with profiles and plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.fx_passes import pad_mm

import memfit
from memfit.ir.plan import Plan
from memfit.runtime.apply import Applied
from memfit.runtime.compile import padding
from memfit.runtime.compile.compiled import CompiledSegments, compiled_segments
from memfit.runtime.compile.joint import structure_of

Answer = Callable[[bool], list[tuple[int, ...]]]


@pytest.fixture(autouse=True)
def nothing_decided() -> Iterator[None]:
    before = padding.decisions()
    padding._decided.clear()
    yield
    padding._decided.clear()
    padding.remember(before)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Have inductor find that padding pays, or not; the products that it looked at."""

    def answer(pads: bool) -> list[tuple[int, ...]]:
        asked: list[tuple[int, ...]] = []

        def should_pad(match, mat1, mat2, op, input=None) -> bool:
            asked.append((*mat1.shape, *mat2.shape))
            return pads

        monkeypatch.setattr(pad_mm, "should_pad", should_pad)
        return asked

    return answer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 13), nn.Linear(13, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(self.wide(x).relu())


def _structure(layer: nn.Module, x: torch.Tensor) -> str:
    segments = CompiledSegments("inductor")
    segments(layer.forward, (x,), {}).sum().backward()
    assert segments.last_key is not None
    segments.close()
    return structure_of(segments.last_key)


@pytest.mark.parametrize("bias", [False, True])
def test_the_next_process_runs_the_same_operators(answer: Answer, bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 13, bias=bias), torch.randn(8, 16, requires_grad=True)
    asked = answer(True)
    padded = _structure(layer, x)
    assert asked and len(asked) == len(set(asked)), "asked twice"
    known = padding.decisions()
    assert set(known.values()) == {True}

    padding._decided.clear()  # another process, which finds otherwise
    answer(False)
    assert _structure(layer, x) != padded

    padding._decided.clear()
    padding.remember(known)
    asked = answer(False)
    assert _structure(layer, x) == padded
    assert not asked, "timed again"


def test_sizes_that_are_symbols_are_left_to_inductor(answer: Answer) -> None:
    asked = answer(False)

    class Symbol:
        shape = ("s0", 4)
        dtype = torch.float32

    with padding.decided_once():
        for _ in range(2):
            pad_mm.should_pad(None, Symbol(), Symbol(), "mm")
    assert len(asked) == 2 and not padding.decisions()


def test_what_was_decided_goes_with_the_profile_and_the_plan(
    answer: Answer, tmp_path: Path
) -> None:
    answer(True)
    model = nn.Sequential(Block(), Block(), Block())
    workload = memfit.Workload(
        model=model,
        batch=torch.randn(8, 16),
        loss_fn=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
    )
    profile = memfit.profile(workload, executor="inductor")
    assert profile.padded == padding.decisions() != {}
    plan = memfit.plan(profile, strategy="none")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").padded == profile.padded
    padding._decided.clear()
    other = replace(plan, padded=dict.fromkeys(plan.padded, False))
    with Applied(other, model):
        pass
    assert padding.decisions() == other.padded
    compiled_segments("inductor").close()
