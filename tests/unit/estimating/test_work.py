"""FLOPs of a step, counted where torch's own counter refuses to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import flop_registry

from memfit.estimating.estimate import estimate
from memfit.workload import Workload

BATCH, HEADS, LENGTH, WIDTH = 2, 8, 32, 16


class Attention(nn.Module):
    """Attention between parameters, and nothing else that has FLOPs."""

    def __init__(self, shared_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        heads = {"query": HEADS, "key": shared_heads, "value": shared_heads}
        for name, number in heads.items():
            made = torch.randn(BATCH, number, LENGTH, WIDTH, dtype=dtype)
            setattr(self, name, nn.Parameter(made))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * F.scaled_dot_product_attention(
            self.query, self.key, self.value, enable_gqa=self.key.shape[1] != HEADS
        )


def flops_of_step(shared_heads: int, dtype: torch.dtype = torch.bfloat16) -> int:
    def build() -> Workload:
        model = Attention(shared_heads, dtype)
        optimizer = torch.optim.SGD(model.parameters())
        return Workload(model, lambda model, x: model(x).sum(), optimizer, torch.ones(()))

    return estimate(build).flops


@pytest.fixture
def equal_heads_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas of attention as torch 2.11 has them: later ones take grouped heads."""

    def strict(formula: Callable[..., int], first: int) -> Callable[..., int]:
        def count(*args: Any, **kwargs: Any) -> int:
            shapes = [getattr(a, "shape", a) for a in args[first : first + 3]]
            assert len({shape[1] for shape in shapes}) == 1, "shapes are incompatible"
            return formula(*args, **kwargs)

        return count

    for kernel in ("flash", "efficient", "cudnn"):
        for suffix, first in {"": 0, "_backward": 1}.items():
            packet = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{suffix}")
            monkeypatch.setitem(flop_registry, packet, strict(flop_registry[packet], first))


@pytest.mark.usefixtures("equal_heads_only")
@pytest.mark.parametrize("shared_heads", [HEADS, 2, 1])
def test_grouped_query_attention_counts_by_the_heads_of_the_query(shared_heads: int) -> None:
    product = 2 * BATCH * HEADS * LENGTH * LENGTH * WIDTH
    assert flops_of_step(shared_heads) == (2 + 5) * product, "forward, backward with its recompute"


@pytest.mark.usefixtures("equal_heads_only")
def test_attention_without_a_fused_kernel_for_groups_counts_its_products() -> None:
    product = 2 * BATCH * HEADS * LENGTH * LENGTH * WIDTH
    assert flops_of_step(2, torch.float32) == (2 + 4) * product
    assert flops_of_step(HEADS, torch.float32) == (2 + 5) * product, "memory-efficient"
