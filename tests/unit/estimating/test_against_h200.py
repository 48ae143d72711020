"""Estimates beside peaks that were measured on an H200 (benchmarks/results)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memfit.estimating.estimate import estimate
from memfit.ir.estimate import Estimate
from memfit.workload import Workload

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "foundation-h200.json"
# What was measured are torchvision's ResNets; those of transformers are the same operators.
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "encoder@256x128": ("encoder", {"batch": 256, "seq": 128}),
    "gpt2-large@8x1024 bf16": (
        "transformers:gpt2-large",
        {"batch": 8, "seq": 1024, "dtype": "bf16"},
    ),
    "resnet50@64": ("transformers:resnet-50", {"batch": 64}),
    "resnet152@64": ("transformers:resnet-152", {"batch": 64}),
}


# It ran with CUBLAS_WORKSPACE_CONFIG=:4096:8, for which cuBLAS keeps some 70 MiB more.
_STATIC = {"gpt2-large@8x1024 bf16": 0.007}


class Layer(nn.Module):
    """A layer of torchvision's vit_b_16."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(768), nn.LayerNorm(768)
        self.self_attention = nn.MultiheadAttention(768, 12, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.ln_1(x)
        y = self.self_attention(y, y, y, need_weights=False)[0] + x
        return y + self.mlp(self.ln_2(y))


class Vit(nn.Module):
    """torchvision's vit_b_16 at 224x224, which cannot be imported everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, 768, 16, 16)
        self.class_token = nn.Parameter(torch.zeros(1, 1, 768))
        self.pos_embedding = nn.Parameter(torch.zeros(1, 197, 768))
        self.layers = nn.Sequential(*(Layer() for _ in range(12)))
        self.ln, self.head = nn.LayerNorm(768), nn.Linear(768, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.conv_proj(images).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1)
        return self.head(self.ln(self.layers(x + self.pos_embedding))[:, 0])


def vit() -> Workload:
    model = Vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch = (torch.randn(64, 3, 224, 224), torch.randint(1000, (64,)))
    return Workload(
        model, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), optimizer, batch
    )


@pytest.mark.parametrize("name", [*TARGETS, "vit_b_16@64"])
def test_estimates_are_what_the_h200_showed(name: str) -> None:
    rows = json.loads(RESULTS.read_text())["workloads"][name]
    made = _estimate(name)
    assert made.peak_bytes == pytest.approx(rows["profile"]["peak_bytes"], rel=0.01)
    static = made.static_bytes + made.categories["other"]
    assert static == pytest.approx(rows["profile"]["static_bytes"], rel=_STATIC.get(name, 0.001))
    # A bound: it knows nothing of what a replay needs on the way.
    everything = rows["peers"]["memfit all"]["peak_bytes"]
    assert 0.75 * everything < made.needs.recompute_bytes < 1.01 * everything
    assert made.cards[0].fits


def _estimate(name: str) -> Estimate:
    if name not in TARGETS:
        return estimate(vit, "h200")
    target, options = TARGETS[name]
    if target.startswith("transformers:"):
        pytest.importorskip("transformers")
    return estimate(target, "h200", **options)
