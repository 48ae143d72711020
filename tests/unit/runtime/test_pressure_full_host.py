"""A valve whose host memory is full: what it asks for, and how often it collects garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memfit
from memfit.runtime.pressure import garbage
from memfit.runtime.pressure.saved import Saved
from memfit.runtime.pressure.valve import Valve
from memfit.runtime.swap.arena import Arena

FLOATS = 1000
UNIT = 4 * FLOATS  # bytes of each tensor that `grown` saves


class Collections:
    """Stands in the place of the module gc, and counts full collections."""

    def __init__(self) -> None:
        self.count = 0

    def collect(self) -> int:
        self.count += 1
        return gc.collect()


@pytest.fixture(autouse=True)
def collections(frozen_garbage: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collections]:
    """Those of the test, which may have one; the process's own come at other times."""
    counted = Collections()
    monkeypatch.setattr("memfit.runtime.swap.arena.gc", counted)
    monkeypatch.setattr(garbage, "gc", counted)
    monkeypatch.setattr(garbage, "_not_before", 0.0)
    monkeypatch.setattr(garbage, "_SHARE", 1e9)  # not again in this test
    gc.disable()
    yield counted
    gc.enable()
    gc.collect()
    assert not [thing for thing in gc.get_objects() if isinstance(thing, Saved)]


def valve(host_units: int) -> Valve:
    return memfit.pressure(
        0, device="cpu", min_tensor_bytes=64, host_budget=host_units * (UNIT + 512)
    )


def grown(times: int) -> torch.Tensor:
    """A loss whose graph saves so many tensors of UNIT bytes."""
    weight = torch.ones((), requires_grad=True)
    total = torch.zeros(())
    for number in range(times):
        tensor = torch.full((FLOATS,), float(number))
        total = total + (weight * tensor)[0]
        del tensor
    return total


def test_a_full_host_made_the_valve_collect_garbage_for_every_tensor(
    collections: Collections, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = Arena.take

    def counted(self: Any, size: int) -> Any:
        taken.append(size)
        return take(self, size)

    monkeypatch.setattr(Arena, "take", counted)
    with valve(4) as full:
        for _ in range(5):
            grown(60).backward()
    assert collections.count == 1
    # One more than there is room for is asked for in each forward, and then no other.
    assert full.refusals == 5
    assert full.statistics.swaps == full.statistics.retrievals == 5 * 4
    assert len(taken) <= 5 * 5 + 3, "the first grows the arena, the first refused is tried again"


def test_a_valve_with_room_collects_no_garbage(collections: Collections) -> None:
    for _ in range(3):
        with valve(100) as ample:
            grown(20).backward()
        assert ample.statistics.swaps > 10
    assert collections.count == 0


def test_collections_are_far_apart(
    collections: Collections, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(garbage, "_SHARE", 50)
    monkeypatch.setattr(garbage.time, "monotonic", lambda: now[0])

    def collect() -> int:
        collections.count += 1
        now[0] += 0.2
        return 0

    monkeypatch.setattr(garbage.gc, "collect", collect)
    assert garbage.collected() and not garbage.collected()
    now[0] += 9.9
    assert not garbage.collected()
    now[0] += 0.2
    assert garbage.collected()
    assert collections.count == 2


def test_host_memory_that_garbage_holds_is_taken_back(collections: Collections) -> None:
    """A step that failed, as an error leaves it: in a cycle with its graph."""
    with valve(4) as small:
        loss = grown(10)
        assert small.statistics.swaps == 4
        frame: list[Any] = [loss]
        frame.append(frame)
        del loss, frame
        garbage._not_before = 0.0
        grown(10).backward()
        assert small.statistics.swaps == 4 + 4
    assert collections.count == 2, "once before there was garbage"


def test_a_smaller_tensor_goes_where_a_larger_one_found_no_room() -> None:
    weight = torch.ones((), requires_grad=True)
    with valve(2) as small:
        large = (weight * torch.full((10 * FLOATS,), 3.0))[0]
        after = grown(3)
        assert (small.refusals, small.statistics.swaps) == (1, 0), "the longest idle is too large"
        large.backward()  # and is gone
        later = grown(3)
        assert small.statistics.moved_bytes == 2 * UNIT
        (after + later).backward()
    assert weight.grad == 3
