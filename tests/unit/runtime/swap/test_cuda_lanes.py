"""CUDA's lanes against a simulated device: who waits for whom, and what the clocks say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memfit.ir.swap import Traffic
from memfit.runtime.swap.arena import Slot
from memfit.runtime.swap.lanes import CudaLanes, lanes_for

SECOND_PER_BYTE = 1e-3


class Device:
    """Streams whose work takes simulated time; the host sees what is over by `now`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = self.queries = 0
        self.compute = Stream(self)
        self.current = self.compute


class Stream:
    def __init__(self, device: Device) -> None:
        self.device, self.time = device, 0.0
        self.before: list[Stream] = []

    def __enter__(self) -> None:
        self.before.append(self.device.current)
        self.device.current = self

    def __exit__(self, *_: object) -> None:
        self.device.current = self.before.pop()

    def work(self, seconds: float) -> None:
        self.time += seconds

    def wait_event(self, event: Event) -> None:
        assert event.time is not None, "never recorded"
        self.time = max(self.time, event.time)

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.time)


class Event:
    def __init__(self, device: Device, enable_timing: bool) -> None:
        self.device, self.timing = device, enable_timing
        self.time: float | None = None
        device.events += 1

    def record(self, stream: Stream) -> None:
        self.time = stream.time

    def query(self) -> bool:
        self.device.queries += 1
        return self.over

    @property
    def over(self) -> bool:
        assert self.time is not None
        return self.time <= self.device.now

    def synchronize(self) -> None:
        assert self.time is not None
        self.device.now = max(self.device.now, self.time)

    def elapsed_time(self, end: Event) -> float:
        assert self.timing and end.timing and self.over and end.over
        assert self.time is not None and end.time is not None
        return (end.time - self.time) * 1e3


class Memory:
    """Stands for a tensor of bytes."""

    def __init__(self, device: Device, size: int) -> None:
        self.device, self.size = device, size

    def numel(self) -> int:
        return self.size

    def copy_(self, source: Memory, non_blocking: bool) -> None:
        assert non_blocking and source.size == self.size
        assert self.device.current is not self.device.compute
        self.device.current.work(self.size * SECOND_PER_BYTE)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(made))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: Event(made, enable_timing))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    return made


def _slot(device: Device, size: int, after: Any = None) -> Slot:
    return Slot(Memory(device, size), after, None, 0, 0, size)  # type: ignore[arg-type]


def _memory(device: Device, size: int) -> Any:
    return Memory(device, size)


def test_the_device_has_a_number(device: Device) -> None:
    assert lanes_for(torch.device("cuda")).device == torch.device("cuda", 3)
    assert lanes_for(torch.device("cuda:1")).device == torch.device("cuda", 1)
    assert lanes_for(torch.device("cuda")).pinned


def test_copies_follow_the_computation_and_one_another(device: Device) -> None:
    lanes = CudaLanes(torch.device("cuda"))
    device.compute.work(10)
    slots = [_slot(device, 1000), _slot(device, 2000)]
    outs = [lanes.copy_out(_memory(device, s.view.numel()), s) for s in slots]
    assert [slot.written for slot in slots] == outs
    assert [out.end.time for out in outs] == [11, 13], "after the computation, in order"
    back = lanes.copy_in(slots[1], _memory(device, 2000))
    assert back.end.time == 15, "after the copy out of its slot, which ended at 13"
    reused = _slot(device, 500, after=back)
    assert lanes.copy_out(_memory(device, 500), reused).end.time == 15.5
    assert device.now == 0, "the host waited for nothing"


def test_memory_goes_when_the_computation_waits_and_stalls_are_timed(device: Device) -> None:
    lanes = CudaLanes(torch.device("cuda"))
    out = lanes.copy_out(_memory(device, 1000), slot := _slot(device, 1000))
    device.compute.work(0.25)
    lanes.wait(out)
    assert device.compute.time == 1 and device.now == 0
    back = lanes.copy_in(slot, _memory(device, 1000))
    device.compute.work(5)
    lanes.wait(back)
    assert device.compute.time == 6, "this copy is hidden"
    there, here = lanes.traffic()
    assert there == Traffic(1000, 1, pytest.approx(1), pytest.approx(0.75), 1)
    assert here == Traffic(1000, 1, pytest.approx(1), 0.0, 0)
    assert there.hidden_share == pytest.approx(0.25) and here.hidden_share == 1
    lanes.reset_traffic()
    assert lanes.traffic() == (Traffic(), Traffic())


def test_a_copy_that_is_over_is_not_waited_for(device: Device) -> None:
    lanes = CudaLanes(torch.device("cuda"))
    out = lanes.copy_out(_memory(device, 1000), _slot(device, 1000))
    assert not lanes.done(out)
    lanes.synchronize()
    assert lanes.done(out)
    events = device.events
    lanes.wait(out)
    assert device.events == events and device.compute.time == 0


def test_another_stream_that_uses_the_memory_and_its_owner_both_wait(device: Device) -> None:
    lanes = CudaLanes(torch.device("cuda"))
    back = lanes.copy_out(_memory(device, 1000), _slot(device, 1000))
    other = Stream(device)
    with other:
        lanes.wait(back)
    assert other.time == device.compute.time == 1


def test_a_thousand_steps_use_the_same_events(device: Device) -> None:
    lanes = CudaLanes(torch.device("cuda"))
    free = None
    counts = []
    for step in range(1000):
        slots = []
        for _ in range(3):
            device.compute.work(0.1)
            slot = _slot(device, 200, free)
            out = lanes.copy_out(_memory(device, 200), slot)
            lanes.wait(out)
            slots.append(slot)
        for slot in reversed(slots):
            free = lanes.copy_in(slot, _memory(device, 200))
            device.compute.work(0.1)
            lanes.wait(free)
        device.now = device.compute.time - 2  # the host runs ahead of the device
        if step % 100 == 99:
            counts.append(device.events)
    assert len(set(counts[1:])) == 1
    assert lanes.traffic()[0].copies == lanes.traffic()[1].copies == 3000
    assert lanes.traffic()[0].busy_s == pytest.approx(600)


def test_starting_a_copy_asks_after_others_only_where_no_event_is_free(device: Device) -> None:
    lanes = CudaLanes(torch.device("cuda"))
    for _ in range(8):
        lanes.copy_out(_memory(device, 100), _slot(device, 100))
    device.now = device.compute.time + 10  # all are over
    before = device.events, device.queries
    lanes.copy_out(_memory(device, 100), _slot(device, 100))
    assert device.queries == before[1] + 8, "once, for all of them: their events are free"
    for _ in range(7):
        lanes.copy_out(_memory(device, 100), _slot(device, 100))
    assert (device.events, device.queries) == (before[0], before[1] + 8)
    assert lanes.traffic()[0].copies == 16


def test_copies_in_flight_are_counted_without_waiting(device: Device) -> None:
    lanes = CudaLanes(torch.device("cuda"))
    assert lanes.in_flight() == 0
    for _ in range(3):
        slot = _slot(device, 1000)
        lanes.copy_out(_memory(device, 1000), slot)
    lanes.copy_in(slot, _memory(device, 1000))
    assert lanes.in_flight() == 4 and device.now == 0
    device.now = 2.0  # two of the copies out are over, which take a second each
    assert lanes.in_flight() == 2
    lanes.synchronize()
    assert lanes.in_flight() == 0


def test_a_copy_may_end_while_events_are_asked_for(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own is taken back then: there is nothing left to wait for."""
    lanes = CudaLanes(torch.device("cuda"))
    out = lanes.copy_out(_memory(device, 1000), _slot(device, 1000))
    assert not lanes.done(out)
    asked = lanes._event

    def later() -> Any:
        device.now = 100
        return asked()

    monkeypatch.setattr(lanes, "_event", later)
    lanes.wait(out)
    assert lanes.done(out) and lanes.in_flight() == 0
    assert lanes.traffic()[0].stalls == 0
