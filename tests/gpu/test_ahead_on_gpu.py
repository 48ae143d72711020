"""Other processes compile for a GPU without taking any of its memory."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from memfit.runtime.compile import ahead
from memfit.runtime.compile.compiled import CompiledSegments

WATCHED_S = 5.0


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.last, self.dropout = nn.Conv2d(width, width, 1), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.last(self.norm(self.conv(x)).relu()))


def _step(segments: CompiledSegments, block: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x.grad = None
    block.zero_grad()
    output = segments(block.forward, (x,), {})
    output.square().mean().backward()
    return [
        output.detach(),
        *(t.grad.clone() for t in (x, *block.parameters()) if t.grad is not None),
    ]


def test_workers_leave_code_and_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ahead.ASKED, "3")
    monkeypatch.setattr(ahead, "_failed", False)
    if ahead.worker_count() < 2:
        pytest.skip("needs three cores")
    segments = CompiledSegments("inductor")
    blocks = [Bottleneck(width).cuda() for width in (32, 48, 64)]
    inputs = [torch.randn(8, w, 16, 16, device="cuda", requires_grad=True) for w in (32, 48, 64)]
    with fresh_cache():
        alone = [_step(segments, b, x) for b, x in zip(blocks, inputs, strict=True)]
    segments.close()
    with fresh_cache():
        with segments.measuring(), segments.ahead():
            for block, x in zip(blocks, inputs, strict=True):
                segments(block.forward, (x,), {})
            assert len(segments.workers.work) == len(blocks)
            torch.cuda.synchronize()
            free, _ = torch.cuda.mem_get_info()
            end = time.monotonic() + WATCHED_S
            while time.monotonic() < end:
                assert torch.cuda.mem_get_info()[0] >= free, "a worker took memory of the card"
                time.sleep(0.05)
        assert not ahead._failed
        hits, misses = (counters["inductor"][f"fxgraph_cache_{w}"] for w in ("hit", "miss"))
        found = [_step(segments, b, x) for b, x in zip(blocks, inputs, strict=True)]
        assert counters["inductor"]["fxgraph_cache_miss"] == misses
        assert counters["inductor"]["fxgraph_cache_hit"] == hits + 2 * len(blocks)
    assert not ahead._failed
    for one, other in zip(alone, found, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b)
    segments.close()
