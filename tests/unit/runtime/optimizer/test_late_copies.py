"""Copies that end as late as they may: whatever is read too early is found out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memfit.runtime.optimizer.in_backward.step_in_backward import HalfStepError, StepInBackward
from memfit.runtime.optimizer.on_host import state_on_host, step_on_host
from memfit.runtime.swap.arena import Slot
from memfit.runtime.swap.lanes import BACK, Copy, HostLanes


class Pending:
    """Stands for the event at the end of a copy."""

    def __init__(self, lanes: LateLanes, direction: int, run: Callable[[], None]) -> None:
        self._lanes, self._direction, self.run = lanes, direction, run
        self.over = False

    def synchronize(self) -> None:
        """Do what comes before in this direction, then this."""
        queue = self._lanes.queues[self._direction]
        with self._lanes.lock:
            while not self.over:
                first = queue.popleft()
                first.run()
                first.over = True


class LateLanes(HostLanes):
    """Lanes that copy when someone waits, and find nonsense in memory that was not waited for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.lock = threading.RLock()
        self.queues: tuple[deque[Pending], deque[Pending]] = (deque(), deque())

    def copy_out(self, source: torch.Tensor, slot: Slot) -> Copy:
        slot.written = self._later(0, lambda: slot.view.copy_(source), None)
        return slot.written

    def copy_in(self, slot: Slot, target: torch.Tensor) -> Copy:
        target.fill_(0xFF)  # not a number, until the copy is there
        return self._later(1, lambda: target.copy_(slot.view), slot.written)

    def wait(self, copy: Copy) -> None:
        if copy.direction == BACK:  # what the computation waits for is not on the host yet
            copy.end.synchronize()

    def done(self, copy: Copy) -> bool:
        return copy.end.over

    def synchronize(self) -> None:
        for queue in self.queues:
            if queue:
                queue[-1].synchronize()

    def _later(self, direction: int, run: Callable[[], Any], after: Copy | None) -> Copy:
        def run_in_order() -> None:
            if after is not None:
                after.end.synchronize()
            run()

        pending = Pending(self, direction, run_in_order)
        self.queues[direction].append(pending)
        return Copy(direction, 0, 0, end=pending)


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (state_on_host, step_on_host):
        monkeypatch.setattr(module, "lanes_for", LateLanes)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("kind", [state_on_host.StateOnHost, step_on_host.StepOnHost])
def test_nothing_is_read_before_it_is_there(training: Any, kind: Any, in_backward: bool) -> None:
    losses, end = training.expect("adamw_fused")
    model, optimizer = training.build("adamw_fused")
    groups = training.groups_of(model)
    with kind(optimizer, groups) as host:
        if in_backward:
            with StepInBackward(optimizer, groups, stepper=host) as stepper:
                training.same(training.train_in_backward(stepper, model), losses)
        else:
            training.same(training.train_plainly(model, optimizer), losses)
        training.same(training.snapshot(model, optimizer), end)
    training.same(training.snapshot(model, optimizer), end)


@pytest.mark.parametrize("kind", [state_on_host.StateOnHost, step_on_host.StepOnHost])
def test_a_checkpoint_can_be_loaded_after_half_a_step(training: Any, kind: Any) -> None:
    losses, end = training.expect("adamw_fused")
    model, optimizer = training.build("adamw_fused")
    groups = training.groups_of(model)
    with (
        kind(optimizer, groups) as host,
        StepInBackward(optimizer, groups, stepper=host) as stepper,
    ):
        trained = training.train_in_backward(stepper, model, range(10))
        saved = training.snapshot(model, optimizer)
        loss = training.loss_of(model, 10)
        handle = model.embedding.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(HalfStepError, match="ZeroDivisionError"):
            stepper.backward(loss)
        handle.remove()
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        model.zero_grad()
        training.same(training.snapshot(model, optimizer), saved)
        trained += training.train_in_backward(stepper, model, range(10, 20))
    training.same(trained, losses)
    training.same(training.snapshot(model, optimizer), end)


@pytest.mark.parametrize("kind", [state_on_host.StateOnHost, step_on_host.StepOnHost])
def test_loading_and_undoing_wait_for_copies(training: Any, kind: Any) -> None:
    losses, end = training.expect("adamw_fused")
    model, optimizer = training.build("adamw_fused")
    host = kind(optimizer, training.groups_of(model)).install()
    trained = training.train_plainly(model, optimizer, range(10))
    saved = training.snapshot(model, optimizer)
    training.train_plainly(model, optimizer, range(15, 17))
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    trained += training.train_plainly(model, optimizer, range(10, 15))
    host.undo()
    trained += training.train_plainly(model, optimizer, range(15, 20))
    training.same(trained, losses)
    training.same(training.snapshot(model, optimizer), end)
