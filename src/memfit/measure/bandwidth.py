"""How fast bytes are copied: within the host, and between host and device.

What a plan needs of it (`copy_rates`) is measured once per process and device: one copy each way,
how long the smallest takes, and how much copies slow down memory-bound work beside them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from memfit.ir.profile import CopyRates
from memfit.measure.step import is_out_of_memory

REPEATS = 7
HOST_BYTES = 256 * 2**20  # well past any cache
DEVICE_BYTES = 256 * 2**20
RATE_BYTES = 64 * 2**20  # for plans: the device may have little left
SMALL_BYTES = 4096
MOST_DRAG = 0.5
COPIES = 2  # of each direction, one after the other, to measure what runs beside them


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


def copy_rates(device: torch.device) -> CopyRates | None:
    """How copies to the host and back go; None when the device has no room to measure it."""
    if device.type == "cpu":
        return _host_rates()
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        return _device_rates(torch.device("cuda", index))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        torch.cuda.empty_cache()


@cache
def _host_rates() -> CopyRates:
    rate = host_copy_bandwidth(RATE_BYTES)
    latency_s = SMALL_BYTES / host_copy_bandwidth(SMALL_BYTES, 101)
    return CopyRates(rate, rate, latency_s, drag=1.0)  # nothing runs beside a copy here


@cache
def _device_rates(device: torch.device) -> CopyRates:
    with torch.cuda.device(device):
        here, other = (torch.ones(RATE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        sent, got = (torch.ones(RATE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        out_s = _median_seconds(lambda: sent.copy_(here, non_blocking=True), REPEATS)
        in_s = _median_seconds(lambda: here.copy_(got, non_blocking=True), REPEATS)
        few, sent_few = here[:SMALL_BYTES], sent[:SMALL_BYTES]
        latency_s = _median_seconds(lambda: sent_few.copy_(few, non_blocking=True), 21)
        target = torch.empty_like(here)
        # As much work as one copy each way takes; a copy within the device might use their engines.
        source = here.view(torch.float32)
        result = target.view(torch.float32)
        alone_s = _median_seconds(lambda: torch.add(source, 1, out=result), REPEATS)
        repeats = max(1, round(min(out_s, in_s) / alone_s))
        lanes = tuple(torch.cuda.Stream() for _ in range(2))

        def copy() -> None:
            """Begin copies both ways that last longer than the work."""
            for lane, into, source in zip(lanes, (sent, other), (here, got), strict=True):
                with torch.cuda.stream(lane):
                    for _ in range(COPIES):
                        into.copy_(source, non_blocking=True)

        def work() -> None:
            for _ in range(repeats):
                torch.add(source, 1, out=result)

        work_s = _median_seconds(work, REPEATS)
        # The host takes a while to begin them, which is none of the work's time.
        both_s = _median_seconds(work, REPEATS, before=copy)
        torch.cuda.synchronize()
    drag = (both_s - work_s) / work_s / 2
    return CopyRates(
        RATE_BYTES / out_s, RATE_BYTES / in_s, latency_s, min(max(drag, 0.0), MOST_DRAG)
    )


def _median_seconds(
    work: Callable[[], object], repeats: int, before: Callable[[], object] | None = None
) -> float:
    """Seconds of the work by the device's clock, with what was begun `before` it under way."""
    work()
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if before is not None:
            before()
        start.record()
        work()
        stop.record()
        stop.synchronize()
        seconds.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(seconds)
