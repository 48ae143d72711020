"""A plan that moves memory inside a safety valve, which falls asleep and wakes within steps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.runtime.pressure import attention, saved_tensors
from memfit.runtime.recompute import Recompute
from memfit.runtime.swap.hooks import top_hooks

CALLS = ["stem", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
CAPACITY = 10**6
BUSY = 7 * CAPACITY // 10


class Device:
    """Memory in use as the test says it."""

    counts = False
    look_every = 1
    in_use = 0
    coming = 0  # in use from the middle of the next forward on

    def allocated(self) -> int:
        return self.in_use

    def added(self, size: int) -> None: ...

    def removed(self, size: int) -> None: ...


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """What valves ask in the test, at every call of a module while they doze."""
    made = Device()
    monkeypatch.setattr(saved_tensors, "gauge_for", lambda device, capacity: made)
    monkeypatch.setattr(attention, "_LOOK_S", 0.0)
    return made


def _step(model: nn.Module, batch: torch.Tensor) -> list[Any]:
    torch.manual_seed(1)
    model.zero_grad()
    model(batch).square().mean().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("runs", [[], [(1, 1), (3, 4)]], ids=["", "and recompute"])
def test_a_plan_moved_nothing_in_a_step_in_which_a_valve_fell_asleep_or_woke(
    zoo: SimpleNamespace,
    swapping: SimpleNamespace,
    assert_same: Callable[..., None],
    device: Device,
    runs: list[tuple[int, int]],
) -> None:
    model, batch = zoo.workload(zoo.Stack).model, zoo.sequences()
    expected = _step(model, batch)
    # The stem's tensors are left to the valve, which hears of them before the plan moves anything.
    moves = {i: move for i, move in swapping.everything(len(CALLS)).items() if i}
    modules = {i: model.get_submodule(name) for i, name in enumerate(CALLS)}
    model.get_submodule("blocks.1").register_forward_pre_hook(
        lambda module, args: setattr(device, "in_use", device.coming)
    )
    inner = Recompute(runs, modules)
    with swapping.swapped(model, CALLS, swapping.LazyLanes(), moves=moves, inner=inner) as at_work:

        def moved() -> int:
            at_work.engine.reset_statistics()
            assert_same(_step(model, batch), expected)
            return int(at_work.engine.statistics().out.bytes)

        planned = moved()
        assert planned > 0
        with memfit.pressure(
            0.8, capacity=CAPACITY, device="cpu", min_tensor_bytes=64, host_budget="1GiB"
        ) as valve:
            seen = []
            for device.coming in (0, 0, 0, BUSY, BUSY, 0, 0, 0, 0):
                seen.append((moved(), valve.dozes))
        assert [dozes for _, dozes in seen] == [False, *[True] * 2, *[False] * 4, *[True] * 2]
        assert [size for size, _ in seen] == [planned] * 9
        assert top_hooks() is None and moved() == planned
