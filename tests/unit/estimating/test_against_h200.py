"""Estimates beside plain peaks that were measured on an H200 (benchmarks/results)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.estimating.estimate import estimate

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "foundation-h200.json"
# The networks of torchvision that were measured stand here in the shape transformers gives them:
# its ResNets are the same operators, its ViT projects query, key and value one by one.
MEASURED: dict[str, tuple[str, dict[str, Any], float]] = {
    "encoder@256x128": ("encoder", {"batch": 256, "seq": 128}, 0.01),
    "gpt2-large@8x1024 bf16": (
        "transformers:gpt2-large",
        {"batch": 8, "seq": 1024, "dtype": "bf16"},
        0.02,
    ),
    "resnet50@64": ("transformers:resnet-50", {"batch": 64}, 0.02),
    "resnet152@64": ("transformers:resnet-152", {"batch": 64}, 0.02),
    "vit_b_16@64": ("transformers:vit-base", {"batch": 64, "optimizer": "sgd"}, 0.10),
}


@pytest.mark.parametrize("name", MEASURED)
def test_estimated_peaks_are_those_of_the_h200(name: str) -> None:
    target, options, tolerance = MEASURED[name]
    if target.startswith("transformers:"):
        pytest.importorskip("transformers")
    measured = json.loads(RESULTS.read_text())["workloads"][name]["profile"]
    made = estimate(target, "h200", **options)
    assert made.peak_bytes == pytest.approx(measured["peak_bytes"], rel=tolerance)
    static = made.static_bytes + made.categories["other"]
    assert static == pytest.approx(measured["static_bytes"], rel=0.01)
    assert made.cards[0].fits
