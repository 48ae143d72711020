"""The table: every row builds, with the parameter count its architecture is known for."""

import pytest

from memfit.targets import resolve_target
from memfit.targets.architectures import ARCHITECTURES

pytest.importorskip("transformers", exc_type=ImportError)

MILLIONS = {
    "gpt2": 124,
    "gpt2-medium": 355,
    "gpt2-large": 774,
    "gpt2-xl": 1558,
    "llama-160m": 162,
    "llama-1b": 1236,
    "llama-3b": 3213,
    "llama-8b": 8030,
    "qwen2.5-0.5b": 494,
    "mistral-7b": 7248,
    "bert-base": 110,
    "bert-large": 336,
    "distilbert": 67,
    "t5-small": 60.5,
    "t5-base": 223,
    "vit-base": 86.6,
    "vit-large": 304,
    "resnet-50": 25.6,
    "resnet-152": 60.2,
}


def test_every_row_has_a_known_count() -> None:
    assert MILLIONS.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameter_count(name: str) -> None:
    workload = resolve_target(f"transformers:{name}", device="meta")
    count = sum(p.numel() for p in workload.model.parameters())
    assert count == pytest.approx(MILLIONS[name] * 1e6, rel=0.03)
    assert {p.device.type for p in workload.model.parameters()} == {"meta"}
