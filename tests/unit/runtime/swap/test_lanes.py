"""Copies on the CPU arrive at once and are counted as what they are: waited for."""

from __future__ import annotations

import pytest
import torch

from memfit.errors import UsageError
from memfit.ir.swap import SwapStatistics, Traffic
from memfit.runtime.swap.arena import Arena
from memfit.runtime.swap.lanes import lanes_for


def test_a_copy_out_and_back_on_the_cpu() -> None:
    lanes, arena = lanes_for(torch.device("cpu")), Arena(2**20, pinned=False)
    assert not lanes.pinned
    source = torch.randint(0, 255, (1000,), dtype=torch.uint8)
    slot = arena.take(1000)
    out = lanes.copy_out(source, slot)
    assert slot.written is out and lanes.done(out)
    target = torch.empty_like(source)
    back = lanes.copy_in(slot, target)
    lanes.wait(back)
    assert torch.equal(source, target)
    assert back.number > out.number
    there, here = lanes.traffic()
    assert there.bytes == here.bytes == 1000 and there.copies == here.copies == 1
    assert there.stalls == 1 and there.stalled_s == there.busy_s > 0
    assert there.hidden_share == 0 and there.gb_per_s > 0
    lanes.reset_traffic()
    assert lanes.traffic() == (Traffic(), Traffic())


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UsageError, match="'meta' cannot be swapped"):
        lanes_for(torch.device("meta"))


def test_statistics_put_both_directions_together() -> None:
    out, back = Traffic(4 * 10**9, 2, 0.2, 0.0, 0), Traffic(10**9, 1, 0.1, 0.15, 3)
    found = SwapStatistics(2, 2, 1, 0, 1, out, back, 64, 32)
    assert (found.out_gb_per_s, found.in_gb_per_s) == (pytest.approx(20), pytest.approx(10))
    assert found.hidden_share == pytest.approx(0.5)
    assert back.hidden_share == 0
    assert found.stalls == 3 and found.per_step(found.moved_bytes) == 2 * 10**9
    assert SwapStatistics(0, 0, 0, 0, 0, Traffic(), Traffic(), 0, 0).hidden_share == 1


def test_a_later_copy_has_a_higher_number_whoever_makes_it() -> None:
    """Engines may use one arena after one another; slots wait for the latest copy."""
    arena = Arena(2**20, pinned=False)
    numbers = []
    for _ in range(2):
        lanes = lanes_for(torch.device("cpu"))
        numbers.append(lanes.copy_out(torch.zeros(10, dtype=torch.uint8), arena.take(10)).number)
    assert numbers[0] < numbers[1]
