"""Recorded allocations: all of them, in order, with the marks between."""

from __future__ import annotations

import gc

import pytest
import torch

from memfit.measure.allocations import Event, _CudaRecorder, mark, peak_above_start, record

CPU = torch.device("cpu")
MIB = 2**20


def test_peak_above_start() -> None:
    events = [
        Event("alloc", 1, 100, "a"),
        Event("mark", 0, 0, "here"),
        Event("alloc", 2, 50, "b"),
        Event("free", 1, 100, "a"),
        Event("free", 9, 30, "was there before"),
        Event("alloc", 3, 60, "c"),
    ]
    # 100, 150, 50, 20, 80: freeing what was there before makes room below the start.
    assert peak_above_start(events) == 150
    assert peak_above_start([]) == 0
    assert peak_above_start([Event("free", 9, 30, "")]) == 0


def test_marks_stand_between_the_allocations_in_order() -> None:
    def work() -> None:
        mark("one")
        first = torch.empty(MIB, dtype=torch.uint8)
        mark("two")
        del first
        mark("three")

    events = [e for e in record(work, CPU) if e.kind == "mark" or e.bytes >= MIB]
    assert [(e.kind, e.label if e.kind == "mark" else "") for e in events] == [
        ("mark", "one"),
        ("alloc", ""),
        ("mark", "two"),
        ("free", ""),
        ("mark", "three"),
    ]
    alloc, free = (e for e in events if e.kind != "mark")
    assert alloc.bytes == free.bytes == MIB
    assert alloc.address == free.address
    assert alloc.label == "aten::empty"


def test_a_temporary_inside_an_operator_is_seen() -> None:
    x = torch.randn(256, 1024)

    def work() -> None:
        # Makes exp(x - max) on the way and frees it before it returns.
        torch.logsumexp(x, 1)

    events = record(work, CPU)
    allocated = [e for e in events if e.kind == "alloc"]
    assert max(e.bytes for e in allocated) >= x.nbytes, "a temporary as large as the input"
    assert peak_above_start(events) >= x.nbytes
    live = sum(e.bytes if e.kind == "alloc" else -e.bytes for e in events if e.kind != "mark")
    assert live <= 4 * 256


def test_backward_allocations_are_seen_too() -> None:
    x = torch.randn(512, 512, requires_grad=True)
    events = record(lambda: x.square().sum().backward(), CPU)
    assert sum(e.bytes for e in events if e.kind == "alloc") >= 2 * x.nbytes
    assert x.grad is not None


def test_a_mark_outside_of_a_recording_is_nothing() -> None:
    mark("nobody listens")
    events = record(lambda: mark("heard"), CPU)
    assert [e.label for e in events if e.kind == "mark"] == ["heard"]


def test_recordings_do_not_nest_and_survive_exceptions() -> None:
    with pytest.raises(AssertionError, match="under way"):
        record(lambda: record(lambda: None, CPU), CPU)

    def fail() -> None:
        raise ValueError("mine")

    collecting = gc.isenabled()
    with pytest.raises(ValueError, match="mine"):
        record(fail, CPU)
    assert gc.isenabled() == collecting
    assert record(lambda: torch.empty(10), CPU)


@pytest.mark.parametrize(("device", "expected"), [("cuda", 1), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_device_without_a_number_is_the_current_one(
    device: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocations of device 0 were read."""
    traces = [[{"action": "alloc", "addr": n, "size": 1000 + n}] for n in (0, 1)]
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: None)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": traces})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with _CudaRecorder(torch.device(device)).recorded() as events:
        pass
    assert [event.address for event in events] == [expected]
