"""A plan of recompute and the safety valve on top of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import memfit
from memfit.capture.profile import profile_workload
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime.pressure.valve import Valve
from memfit.workload import Workload


def _loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return model(pixel_values=images, labels=labels).loss


def _resnet() -> Workload:
    """transformers' ResNet in small, the same every time."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[3, 3], layer_type="basic", num_labels=5
    )
    model = ResNetForImageClassification(config)
    batch = torch.randn(4, 3, 32, 32), torch.randint(5, (4,))
    return Workload(model, _loss, torch.optim.SGD(model.parameters(), lr=0.01), batch)


def _open(threshold: float) -> Valve:
    return memfit.pressure(threshold, capacity="64KiB", device="cpu", min_tensor_bytes=1024)


@pytest.mark.parametrize("executor", ["module", "graph"])
def test_recompute_and_the_valve_together(
    run_numbers: Callable[..., Any], assert_same: Callable[..., None], executor: str
) -> None:
    expected = run_numbers(_resnet(), 2)
    profile = profile_workload(_resnet(), rounds=1, executor=executor)
    plan = make_plan(profile, Goal(strategy="all" if executor == "module" else "optimal"))
    how = "recompute" if executor == "module" else "partial"
    assert any(segment.decision == how for segment in plan.segments)
    for threshold in (0, 0.5):
        planned = _resnet()
        with _open(threshold) as valve, memfit.apply(plan, planned.model) as applied:
            actual = run_numbers(planned, 2)
            assert applied.router is not None
            assert executor == "graph" or applied.router.engine.replays > 0
        assert_same(actual, expected)
        done = valve.statistics
        assert done.swaps == done.retrievals > 0
        assert valve._saved_tensors._gauge.allocated() == 0


def test_a_plan_that_swaps_and_the_valve_together(
    run_numbers: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    expected = run_numbers(_resnet(), 2)
    profile = profile_workload(_resnet(), rounds=1, executor="graph")
    # Small tensors are left to the valve, however fast this machine copies.
    goal = Goal(strategy="swap", techniques=("recompute", "offload"), min_tensor_bytes=8192)
    plan = make_plan(profile, goal)
    planned = _resnet()
    with _open(0) as valve, memfit.apply(plan, planned.model) as applied:
        actual = run_numbers(planned, 2)
        assert applied.swap is not None and applied.swap.statistics().moves > 0
    assert_same(actual, expected)
    assert valve.statistics.swaps == valve.statistics.retrievals > 0, "what lies between segments"


def test_the_valve_may_be_entered_inside_the_plan_too(
    run_numbers: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    plain, planned = _resnet(), _resnet()
    plan = make_plan(profile_workload(planned, rounds=1, executor="module"), Goal(strategy="all"))
    with memfit.apply(plan, planned.model), _open(0) as valve:
        actual = run_numbers(planned, 2)
    assert_same(actual, run_numbers(plain, 2))
    assert valve.statistics.swaps == valve.statistics.retrievals > 0
