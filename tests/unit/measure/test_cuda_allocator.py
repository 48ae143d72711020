"""What is done to the CUDA allocator before a step is measured; a CPU stands in for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memfit.measure import cuda_allocator
from memfit.measure.cuda_allocator import prefer_expandable_segments

DEVICE = torch.device("cuda", 0)
MIB = 2**20


def _segment(total: int, used: int, **more: Any) -> dict[str, Any]:
    return {
        "device": 0,
        "total_size": total * MIB,
        "allocated_size": used * MIB,
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        **more,
    }


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ([_segment(314, 32)], ["settings", "empty", "drop", "empty"]),
        ([_segment(34, 32), _segment(20, 2)], ["settings", "empty"]),
        ([_segment(314, 32, is_expandable=True)], ["settings", "empty"]),
        ([_segment(314, 32, device=1)], ["settings", "empty"]),
        ([_segment(314, 32), _segment(20, 20, segment_pool_id=(0, 1))], ["settings", "empty"]),
    ],
    ids=["mostly free", "mostly used", "growing", "another device", "graphs were captured"],
)
def test_scratch_that_keeps_a_large_free_segment_is_dropped(
    segments: list[dict[str, Any]], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """314 MiB of a loss that was long gone stood in every budget: cuBLAS had 32 of them."""
    done: list[str] = []
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(memory, "_set_allocator_settings", lambda _: done.append("settings"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty"))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(cuda_allocator, "drop_cublas_scratch", lambda: done.append("drop"))
    assert prefer_expandable_segments(DEVICE) is not None
    assert done == expected
