"""Single layers run as they are, but for linear ones with odd sizes in fused code on CUDA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import memfit
from memfit.capture.captured import _Capture
from memfit.runtime.compile.compiled import compiled_segments
from memfit.targets import resolve_target
from memfit.workload import Workload

SMALL = {"n_layer": "2", "n_embd": "32", "n_head": "2", "vocab_size": "131"}


def gpt2() -> Workload:
    pytest.importorskip("transformers")
    return resolve_target("transformers:gpt2", batch=8, seq=64, overrides=SMALL, optimizer="sgd")


def test_they_run_as_they_are_on_the_cpu() -> None:
    profile = memfit.profile(gpt2(), executor="inductor")
    head = next(call for call in profile.graph.calls if call.name == "lm_head")
    assert head.leaf and head.graph == -1


@pytest.mark.parametrize(
    ("columns", "device", "executor", "padded"),
    [
        (131, "cuda", "inductor", True),
        (128, "cuda", "inductor", False),
        (131, "cpu", "inductor", False),
        (131, "cuda", "graph", False),
    ],
)
def test_odd_linear_layers_on_cuda_are_padded(
    columns: int, device: str, executor: str, padded: bool
) -> None:
    class Layer(nn.Linear):
        weight = SimpleNamespace(is_cuda=device == "cuda", shape=(columns, 16))  # type: ignore

        def __init__(self) -> None:
            nn.Module.__init__(self)

    layer = Layer()
    capture = _Capture((), compiled_segments(executor))
    assert capture._is_padded(layer.forward) == padded
    assert not capture._is_padded(nn.Embedding(131, 16).forward)


def test_a_head_that_is_compiled_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_linear(self: object, forward: Any) -> bool:
        return isinstance(forward.__self__, nn.Linear)

    monkeypatch.setattr(_Capture, "_is_padded", is_linear)
    workload = gpt2()
    profile = memfit.profile(workload, executor="inductor")
    head = next(call for call in profile.graph.calls if call.name == "lm_head")
    assert head.leaf and head.graph >= 0
    with memfit.fit_workload(workload, "90%", profiled=profile, steps=1) as fitted:
        assert fitted.result.numerics.agree, fitted.result.numerics
        assert abs(fitted.result.peak_error) < 0.05
