"""Every allocation of a piece of code, in order, from the allocator's own events.

Marks set from Python stand between the allocations in the same order. On the CPU the events come
from torch.profiler (it sees compiled code and the inside of kernels too), on CUDA from the caching
allocator's history, which sees every thread. This is the only module that reads either.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "memfit:"
_MARK_BYTES = 77  # a mark in the CUDA history is an allocation of a size nobody else asks for
_CUDA_GRAIN = 512
_CUDA_HISTORY = 5_000_000
# The profiler's library writes a line to stderr at each start and stop unless told not to.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@dataclass(frozen=True, slots=True)
class Event:
    """`kind` is "alloc", "free" or "mark"; `label` the operator or the text of the mark."""

    kind: str
    address: int
    bytes: int
    label: str


class Recorder(Protocol):
    """Records while code runs; the list has the events afterwards. `mark` is called meanwhile."""

    def recorded(self) -> AbstractContextManager[list[Event]]: ...

    def mark(self, text: str) -> None: ...


_active: Recorder | None = None


def mark(text: str) -> None:
    """Put a mark between the allocations being recorded."""
    if _active is not None:
        _active.mark(text)


def record(work: Callable[[], Any], device: torch.device) -> list[Event]:
    """Run `work` and return the allocations on `device` and the marks, in order."""
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()  # a collection in between would free at a random place
    try:
        with recording(device) as events:
            work()
        return events
    finally:
        if collecting:
            gc.enable()


@contextmanager
def recording(device: torch.device) -> Iterator[list[Event]]:
    """Record until the block is left; the list has what `record` returns then."""
    global _active
    assert _active is None, "a recording is under way"
    recorder: Recorder = _CudaRecorder(device) if device.type == "cuda" else _CpuRecorder()
    _active = recorder
    try:
        with recorder.recorded() as events:
            yield events
    finally:
        _active = None


def peak_above_start(events: Iterable[Event]) -> int:
    """Return the highest live bytes above those at the start."""
    return highest_and_last(events)[0]


def highest_and_last(events: Iterable[Event]) -> tuple[int, int]:
    """Return the highest live bytes and those at the end, above those at the start."""
    live = peak = 0
    sizes: dict[int, int] = {}
    for event in events:
        if event.kind == "alloc":
            sizes[event.address] = event.bytes
            live += event.bytes
            peak = max(peak, live)
        elif event.kind == "free":
            live -= sizes.pop(event.address, event.bytes)
    return peak, live


@contextmanager
def _quiet() -> Iterator[None]:
    """Let torch's profiler start and stop without warnings of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _CpuRecorder:
    def mark(self, text: str) -> None:
        with record_function(_MARK + text):
            pass

    @contextmanager
    def recorded(self) -> Iterator[list[Event]]:
        events: list[Event] = []
        profiler: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with _quiet():
            profiler.start()
        try:
            yield events
        finally:
            with _quiet():
                profiler.stop()
        events += self._flatten(profiler.profiler.kineto_results.experimental_event_tree())

    def _flatten(self, tree: list[Any]) -> list[Event]:
        timed: list[tuple[int, int, Event]] = []
        stack: list[tuple[Any, str]] = [(node, "") for node in reversed(tree)]
        while stack:
            node, parent = stack.pop()
            tag, name, event = node.tag.name, parent, None
            if tag == "Allocation" and node.extra_fields.device.type == "cpu":
                size = node.extra_fields.alloc_size
                kind = "alloc" if size > 0 else "free"
                event = Event(kind, node.extra_fields.ptr, abs(size), parent)
            elif tag == "TorchOp":
                name = node.name
                if name.startswith(_MARK):
                    event = Event("mark", 0, 0, name.removeprefix(_MARK))
            if event is not None:
                timed.append((node.start_time_ns, len(timed), event))
            stack.extend((child, name) for child in reversed(node.children))
        timed.sort(key=lambda row: row[:2])
        return [event for _, _, event in timed]


class _CudaRecorder:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[str] = []

    def mark(self, text: str) -> None:
        self._marks.append(text)
        address = torch.cuda.caching_allocator_alloc(_MARK_BYTES, self.device)
        torch.cuda.caching_allocator_delete(address)

    @contextmanager
    def recorded(self) -> Iterator[list[Event]]:
        events: list[Event] = []
        history = torch.cuda.memory._record_memory_history
        history(enabled="all", context=None, max_entries=_CUDA_HISTORY, clear_history=True)
        try:
            yield events
            snapshot = torch.cuda.memory._snapshot()
        finally:
            history(enabled=None)
        device = self.device
        index = torch.cuda.current_device() if device.index is None else device.index
        events += self._read(snapshot["device_traces"][index])

    def _read(self, trace: list[dict[str, Any]]) -> list[Event]:
        events: list[Event] = []
        marks = iter(self._marks)
        mark_address: int | None = None
        for entry in trace:
            action, address, size = entry["action"], entry["addr"], entry["size"]
            if action == "alloc":
                if size == _MARK_BYTES and (text := next(marks, None)) is not None:
                    mark_address = address
                    events.append(Event("mark", 0, 0, text))
                else:
                    rounded = max(-(-size // _CUDA_GRAIN), 1) * _CUDA_GRAIN
                    events.append(Event("alloc", address, rounded, ""))
            elif action == "free_completed":
                if address == mark_address:
                    mark_address = None
                else:
                    rounded = max(-(-size // _CUDA_GRAIN), 1) * _CUDA_GRAIN
                    events.append(Event("free", address, rounded, ""))
        return events
