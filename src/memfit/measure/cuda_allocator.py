"""The CUDA allocator's settings, and what lies in its memory.

The only module that changes these settings; the cap on what a process may take is set in `memory`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.ir.profile import LARGE_PAGE, AllocatorStart, Placed

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SHARED_POOL = (0, 0)  # of everything that is not captured
# cuBLAS takes its scratch anew at the next product; wait for the device before.
drop_cublas_scratch: Callable[[], None]
drop_cublas_scratch = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)


def prefer_expandable_segments(device: torch.device) -> str | None:
    """Let the allocator grow one segment, unless the user chose settings; return what was done.

    Live bytes then take hardly more than themselves; without it a planned step can hold half as
    much again in pieces that fit nothing (measured in benchmarks/results).
    """
    if device.type != "cuda" or any(os.environ.get(name) for name in _VARIABLES):
        return None
    if torch.cuda.memory.get_allocator_backend() != "native":
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 2.11 calls the setter private, 2.13 renames it
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    _give_back_fixed_segments(device)
    return "CUDA allocator set to expandable_segments:True, which keeps reserved memory low"


def _give_back_fixed_segments(device: torch.device) -> None:
    """Drop the scratch of cuBLAS where it may keep a segment from before that is free otherwise.

    That of backward is taken in the middle of the first one, out of any free block, such as that of
    a loss's logits, whose segment is then held for good. Captured graphs know their scratch by its
    address: where there are some, it stays.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == device.index]
    if any(tuple(s.get("segment_pool_id", _SHARED_POOL)) != _SHARED_POOL for s in segments):
        return
    fixed = (s for s in segments if not s.get("is_expandable"))
    if any(s["total_size"] - s["allocated_size"] > LARGE_PAGE for s in fixed):
        drop_cublas_scratch()
        torch.cuda.empty_cache()


def allocator_start(device: torch.device) -> AllocatorStart | None:
    """What the allocator holds now, caches emptied; None if it does not use one growing segment.

    Free blocks of other streams and of captured graphs are held, but nobody here is given them.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    layouts: dict[str, list[Placed]] = {"small": [], "large": []}
    holes: list[int] = []
    stream = torch.cuda.current_stream(device).cuda_stream
    for segment in torch.cuda.memory_snapshot():
        pool = tuple(segment.get("segment_pool_id", _SHARED_POOL))
        if (segment["device"], segment["stream"], pool) != (device.index, stream, _SHARED_POOL):
            continue
        for block in segment["blocks"]:
            free = block["state"] == "inactive"
            if segment.get("is_expandable"):
                placed = Placed(block["address"], block["size"], free)
                layouts[segment["segment_type"]].append(placed)
            elif free:
                holes.append(block["size"])
    if not any(layouts.values()):
        return None
    return AllocatorStart(
        torch.cuda.memory_reserved(device),
        _from_zero(layouts["small"]),
        _from_zero(layouts["large"]),
        tuple(sorted(holes)),
    )


def _from_zero(layout: list[Placed]) -> tuple[Placed, ...]:
    layout = sorted(layout, key=lambda p: p.address)
    base = layout[0].address if layout else 0
    return tuple(Placed(p.address - base, p.bytes, p.free) for p in layout)


def settle_optimizer_state(
    optimizer: torch.optim.Optimizer, device: torch.device, *, values: bool = True
) -> None:
    """Lay the optimizer's state out compactly in device memory.

    Optimizers make their state in their first step, in the gaps that step left; there it would
    split the memory of every later step into pieces. Its values are kept, by way of the host,
    unless nobody will ask for them: then they become zeros, as before the first step.
    """
    if device.type != "cuda":
        return
    tensors = [
        leaf
        for state in optimizer.state.values()
        for leaf in tree_leaves(state)
        if isinstance(leaf, torch.Tensor) and leaf.device == device
    ]
    kept: list[Any] = []
    for tensor in tensors:
        kept.append(tensor.data.cpu() if values else (tensor.size(), tensor.stride()))
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=device)
    torch.cuda.empty_cache()
    for tensor, old in zip(tensors, kept, strict=True):
        if values:
            tensor.data = old.to(device)
        else:
            tensor.data = torch.empty_strided(*old, dtype=tensor.dtype, device=device).zero_()
