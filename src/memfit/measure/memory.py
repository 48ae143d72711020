"""Bytes of a step: static ones by category, and the measured peak."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.measure.allocations import peak_above_start, record
from memfit.workload import Workload, unwrap

_CUDA_GRAIN = 512  # the CUDA allocator hands out multiples of this


@dataclass(frozen=True)
class Peak:
    """Highest live bytes, highest bytes the process held, and allocator retries on the way."""

    bytes: int
    reserved_bytes: int
    retries: int = 0


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The memory behind a tensor: that of its values first, for a sparse one of its indices too."""
    parts = [tensor]
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._values(), tensor._indices()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]
    return [part.untyped_storage() for part in parts]


def static_bytes(workload: Workload) -> dict[str, int]:
    """Bytes there before a step, by category. Each storage counts once, in the first that has it.

    On CUDA, `other` is everything else that is allocated on the device.
    """
    seen: set[int] = set()
    model = unwrap(workload.model)
    state = [leaf for s in workload.optimizer.state.values() for leaf in tree_leaves(s)]
    sizes = {
        "parameters": _unique_bytes(model.parameters(), workload.device, seen),
        "optimizer_state": _unique_bytes(state, workload.device, seen),
        "buffers": _unique_bytes(model.buffers(), workload.device, seen),
        "batch": _unique_bytes(workload.batch_tensors(), workload.device, seen),
    }
    if workload.device.type == "cuda":
        allocated = torch.cuda.memory_allocated(workload.device)
        sizes["other"] = max(0, allocated - sum(sizes.values()))
    return sizes


def living_storages(device: torch.device) -> list[torch.UntypedStorage]:
    """The memory of the tensors on `device` that Python's garbage collector knows, each once."""
    # Other classes are wrapped around these, or have no memory of their own.
    plain = (torch.Tensor, torch.nn.Parameter)
    tensors = [o for o in gc.get_objects() if type(o) in plain and not o.is_mkldnn]
    found = [s for t in tensors if t.device == device for s in storages_of(t)]
    return list({storage.data_ptr(): storage for storage in found if storage.nbytes()}.values())


def measure_peak(workload: Workload, work: Callable[[], Any]) -> Peak:
    """Run `work` and return its peak: static bytes and everything it allocates."""
    return peak_on(workload.device, lambda: sum(static_bytes(workload).values()), work)


def peak_on(device: torch.device, static: Callable[[], int], work: Callable[[], Any]) -> Peak:
    """The peak of `work` on a device; `static` counts what a CPU holds before it.

    A GPU's allocator counts by itself.
    """
    if device.type != "cuda":
        highest = static() + peak_above_start(record(work, device))
        return Peak(highest, highest)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    work()
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    return Peak(
        torch.cuda.max_memory_allocated(device),
        torch.cuda.max_memory_reserved(device),
        int(stats.get("num_alloc_retries", 0)) - int(before),
    )


def cuda_capacity(device: torch.device) -> int:
    """What this process may take: its share of the device, less what others hold of it."""
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return min(int(total * share), torch.cuda.memory_reserved(device) + free)


@contextmanager
def memory_cap(device: torch.device, budget_bytes: int | None) -> Iterator[None]:
    """Let this process take at most `budget_bytes` from a CUDA device's allocator."""
    if device.type != "cuda" or budget_bytes is None:
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def _unique_bytes(tensors: Iterable[Any], device: torch.device, seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.device != device:
            continue
        for storage in storages_of(tensor):
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += _rounded(storage.nbytes(), device)
    return total


def _rounded(size: int, device: torch.device) -> int:
    return -(-size // _CUDA_GRAIN) * _CUDA_GRAIN if device.type == "cuda" else size
