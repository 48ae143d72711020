"""What is done to the CUDA allocator before a step is measured; a CPU stands in for the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memfit.measure import cuda_allocator
from memfit.measure.cuda_allocator import allocator_start, prefer_expandable_segments

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


def test_free_blocks_of_other_streams_and_of_graphs_are_not_there_to_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def segment(address: int, **more: Any) -> dict[str, Any]:
        blocks = [(address, "active_allocated"), (address + 2 * MIB, "inactive")]
        found = [{"address": a, "size": 2 * MIB, "state": state} for a, state in blocks]
        growing = {"is_expandable": True, "segment_type": "large", "stream": 0, "blocks": found}
        return _segment(4, 2, **growing | more)

    segments = [
        segment(2**30),
        segment(2**40, stream=7),
        segment(2**41, segment_pool_id=(0, 1)),
        segment(2**42, device=1),
        segment(2**43, is_expandable=False),
        segment(2**44, is_expandable=False, stream=7),
    ]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 20 * MIB)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    start = allocator_start(DEVICE)
    assert start is not None and start.reserved_bytes == 20 * MIB
    assert [(p.address, p.bytes, p.free) for p in start.large] == [
        (0, 2 * MIB, False),
        (2 * MIB, 2 * MIB, True),
    ]
    assert start.small == () and start.holes == (2 * MIB,)
