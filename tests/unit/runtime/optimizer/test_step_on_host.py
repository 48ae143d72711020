"""The CPU steps a master copy: the numbers of the plain loop, within float rounding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from memfit.errors import UsageError
from memfit.runtime.optimizer.in_backward.step_in_backward import StepInBackward
from memfit.runtime.optimizer.on_host.step_on_host import StepOnHost

TOLERANCE = 1e-4  # after 20 steps of losses, weights and state, where kernels differ


def test_each_optimizer(training: Any, any_optimizer: str) -> None:
    losses, end = training.expect(any_optimizer)
    tolerance = 0.0 if "fused" in any_optimizer else TOLERANCE
    model, optimizer = training.build(any_optimizer)
    with StepOnHost(optimizer, training.groups_of(model)):
        training.same(training.train_plainly(model, optimizer), losses, tolerance)
        training.same(training.snapshot(model, optimizer), end, tolerance)
    training.same(training.snapshot(model, optimizer), end, tolerance)


def test_each_way_to_train_in_backward(
    training: Any, some_optimizer: str, some_scenario: str
) -> None:
    losses, end = training.expect(some_optimizer, some_scenario)
    tolerance = 0.0 if "fused" in some_optimizer else TOLERANCE
    model, optimizer = training.build(some_optimizer)
    options = training.scenario(some_scenario, optimizer)
    groups = training.groups_of(model)
    with (
        StepOnHost(optimizer, groups) as host,
        StepInBackward(
            optimizer, groups, stepper=host, clip="two_pass", clipped=model.parameters()
        ) as stepper,
    ):
        training.same(training.train_in_backward(stepper, model, **options), losses, tolerance)
    training.same(training.snapshot(model, optimizer), end, tolerance)


@pytest.mark.parametrize("on_host_first", [True, False])
def test_resume(training: Any, on_host_first: bool) -> None:
    losses, end = training.expect("adamw_fused")
    trained, saved = [], None
    for half in (range(10), range(10, 20)):
        model, optimizer = training.build("adamw_fused")
        host = StepOnHost(optimizer)
        if on_host_first is (half.start == 0):
            host.install()
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        trained += training.train_plainly(model, optimizer, half)
        saved = copy.deepcopy(training.snapshot(model, optimizer))
        host.undo()
        training.same(training.snapshot(model, optimizer), saved)
    training.same(trained, losses)
    training.same(saved, end)


def test_weights_that_someone_else_changes_are_followed(training: Any) -> None:
    results = []
    for on_host in (False, True):
        model, optimizer = training.build("adamw_fused")
        host = StepOnHost(optimizer)
        if on_host:
            host.install()
        training.train_plainly(model, optimizer, range(2))
        with torch.no_grad():
            model.norm.weight.mul_(2)
        training.train_plainly(model, optimizer, range(2, 5))
        host.undo()
        results.append(training.snapshot(model, optimizer))
    training.same(results[1], results[0])


def test_a_failure_on_the_host_is_told(training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = training.build()
    host = StepOnHost(optimizer)

    def fail(_: Any) -> None:
        raise RuntimeError("no step today")

    with host:
        training.loss_of(model, 0).backward()
        monkeypatch.setattr(host._parts, "run", fail)
        with pytest.raises(RuntimeError, match="no step today"):
            optimizer.step()


def test_footprint(training: Any) -> None:
    model, optimizer = training.build("adamw")
    with StepOnHost(optimizer) as host:
        found = host.footprint()
        rounded = sum(-(-4 * p.numel() // 512) * 512 for p in model.parameters())
        assert found.removed_bytes == found.saved_bytes == 2 * rounded
        assert found.host_bytes == 4 * rounded
        assert host._arena is not None and host._arena.used_bytes == 2 * rounded


def test_a_parameter_with_gaps_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4)[:, :2])
    with pytest.raises(UsageError, match="gaps"):
        StepOnHost(torch.optim.SGD([weight], lr=0.1))
