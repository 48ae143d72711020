"""Every allocation of a piece of code, in order, from the allocators' own events.

torch.profiler reports each allocation and free of the CPU and CUDA allocators, also from compiled
code and from inside kernels. Marks set from Python stand between them in the same order. This is
the only module that reads the profiler's event tree.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "memfit:"
# The profiler's library writes a line to stderr at each start and stop unless told not to.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@dataclass(frozen=True, slots=True)
class Event:
    """`kind` is "alloc", "free" or "mark"; `label` the operator or the text of the mark."""

    kind: str
    address: int
    bytes: int
    label: str


def mark(text: str) -> None:
    """Put a mark between the allocations being recorded."""
    with record_function(_MARK + text):
        pass


def record(work: Callable[[], Any], device: torch.device) -> list[Event]:
    """Run `work` and return the allocations on `device` and the marks, in order."""
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()  # a collection in between would free at a random place
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                work()
    finally:
        if collecting:
            gc.enable()
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    return _flatten(tree, device)


def peak_above_start(events: Iterable[Event]) -> int:
    """Return the highest live bytes above those at the start."""
    live = peak = 0
    sizes: dict[int, int] = {}
    for event in events:
        if event.kind == "alloc":
            sizes[event.address] = event.bytes
            live += event.bytes
            peak = max(peak, live)
        elif event.kind == "free":
            live -= sizes.pop(event.address, event.bytes)
    return peak


def _flatten(tree: list[Any], device: torch.device) -> list[Event]:
    timed: list[tuple[int, int, Event]] = []
    stack: list[tuple[Any, str]] = [(node, "") for node in reversed(tree)]
    while stack:
        node, parent = stack.pop()
        tag = node.tag.name
        name = parent
        if tag == "Allocation":
            fields = node.extra_fields
            if fields.device.type == device.type and fields.device.index in (None, device.index):
                size = fields.alloc_size
                kind = "alloc" if size > 0 else "free"
                event = Event(kind, fields.ptr, abs(size), parent)
                timed.append((node.start_time_ns, len(timed), event))
        elif tag == "TorchOp":
            name = node.name
            if name.startswith(_MARK):
                event = Event("mark", 0, 0, name.removeprefix(_MARK))
                timed.append((node.start_time_ns, len(timed), event))
        stack.extend((child, name) for child in reversed(node.children))
    timed.sort(key=lambda row: row[:2])
    return [event for _, _, event in timed]
