"""How fast bytes are copied: within the host, and between host and device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

REPEATS = 7
HOST_BYTES = 256 * 2**20  # well past any cache
DEVICE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class CopyBandwidth:
    """Bytes per second between host and device; `both` counts each way of copies at once."""

    pinned_to_device: float
    pinned_to_host: float
    both_to_device: float
    both_to_host: float
    pageable_to_device: float
    pageable_to_host: float


def host_copy_bandwidth(size: int = HOST_BYTES, repeats: int = REPEATS) -> float:
    """Bytes per second that one copy within host memory reaches (each byte read and written)."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros_like(source)  # written to, so that its pages exist
    target.copy_(source)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return size / statistics.median(seconds)


def device_copy_bandwidth(
    device: torch.device, size: int = DEVICE_BYTES, repeats: int = REPEATS
) -> CopyBandwidth:
    """Bytes per second of copies to and from a CUDA device, by its own clock."""
    with torch.cuda.device(device):
        here, there = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
        pinned, pinned_back = (
            torch.ones(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        )
        pageable = torch.ones(size, dtype=torch.uint8)
        down, up = torch.cuda.Stream(), torch.cuda.Stream()

        def both() -> None:
            current = torch.cuda.current_stream()
            for stream, target, source in ((down, here, pinned), (up, pinned_back, there)):
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
            current.wait_stream(down)
            current.wait_stream(up)

        def rate(work: Callable[[], object]) -> float:
            return size / _median_seconds(work, repeats)

        at_once = rate(both)
        return CopyBandwidth(
            pinned_to_device=rate(lambda: here.copy_(pinned, non_blocking=True)),
            pinned_to_host=rate(lambda: pinned.copy_(here, non_blocking=True)),
            both_to_device=at_once,
            both_to_host=at_once,
            pageable_to_device=rate(lambda: here.copy_(pageable)),
            pageable_to_host=rate(lambda: pageable.copy_(here)),
        )


def _median_seconds(work: Callable[[], object], repeats: int) -> float:
    work()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        seconds.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(seconds)
