"""Other processes compile for a GPU without taking any of its memory."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

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
            assert len(segments.workers.work) == 2 * len(blocks)
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


FIRST = """
import logging, torch
from torch import nn
from torch._dynamo.utils import counters
from memfit.runtime.compile import ahead
from memfit.runtime.compile.compiled import CompiledSegments

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(256), nn.Dropout(0.1)
        self.mixed, self.wide = nn.Linear(256, 768), nn.Linear(256, 1024)
        self.narrow = nn.Linear(1024, 256)

    def forward(self, x):
        parts = self.mixed(self.norm(x)).view(*x.shape[:2], 3, 4, 64).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(*parts, dropout_p=0.1, is_causal=True)
        x = x + self.dropout(y.transpose(1, 2).flatten(2))
        return x + self.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))

class Loss(nn.Module):
    def forward(self, scores, labels):
        return nn.functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())

logging.basicConfig(level=logging.INFO)
block, loss, head = Block().cuda(), Loss(), nn.Linear(256, 1001, bias=False).cuda()
x = torch.randn(4, 128, 256, device="cuda", requires_grad=True)
scores = torch.randn(4, 128, 1001, device="cuda", dtype=torch.bfloat16, requires_grad=True)
labels = torch.randint(1001, (4, 128), device="cuda")
calls = [(block.forward, (x,)), (head.forward, (x,)), (loss.forward, (scores, labels))]
segments = CompiledSegments("inductor")
with torch.autocast("cuda", torch.bfloat16):
    with segments.measuring(), segments.ahead():
        for forward, args in calls:
            segments(forward, args, {})
        assert len(segments.workers.work) == 6
    assert not ahead._failed
    misses = counters["inductor"]["fxgraph_cache_miss"]
    for forward, args in calls:
        segments(forward, args, {}).sum().backward()
    assert counters["inductor"]["fxgraph_cache_miss"] == misses, "compiled again"
assert not ahead._failed
"""


def test_workers_are_the_first_to_compile_a_transformer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process that compiled nothing yet: what inductor does first must not need the GPU."""
    monkeypatch.setenv(ahead.ASKED, "3")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    run = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
