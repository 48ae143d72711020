"""The host memory of plans: enough for all that are at work, no more than their budgets."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memfit
from memfit.errors import HostMemoryError, InfeasibleError
from memfit.ir.plan import Plan
from memfit.runtime.apply import Applied
from memfit.runtime.swap.attach import arena_for
from memfit.workload import Workload

BUDGET = 10**9


def _workload(zoo: SimpleNamespace) -> Workload:
    """Tensors that are large enough to be moved on every machine."""
    made: Workload = zoo.workload(
        lambda: zoo.Stack(blocks=2, width=64), lambda: torch.randn(64, 32, 8)
    )
    return made


def _plan(zoo: SimpleNamespace, executor: str, **limits: Any) -> Plan:
    return memfit.plan(_workload(zoo), BUDGET, strategy="swap", executor=executor, **limits)


def _gradients(workload: Workload) -> list[Any]:
    return [p.grad for p in workload.model.parameters()]


def test_two_models_in_one_backward_have_room_for_what_both_move(
    zoo: SimpleNamespace, assert_same: Any
) -> None:
    workloads, plain = ([_workload(zoo) for _ in "ab"] for _ in "cd")
    torch.manual_seed(3)
    torch.stack([w.compute_loss() for w in plain]).sum().backward()
    plan = _plan(zoo, "module")
    with ExitStack() as stack:
        applied = [stack.enter_context(Applied(plan, w.model)) for w in workloads]
        torch.manual_seed(3)
        torch.stack([w.compute_loss() for w in workloads]).sum().backward()
        for one in applied:
            assert one.swap is not None and one.swap.statistics().moves > 0
    assert_same([_gradients(w) for w in workloads], [_gradients(w) for w in plain])


@pytest.mark.parametrize("executor", ["module", "graph"])
def test_two_threads_with_a_model_each_move_as_much_as_one(
    zoo: SimpleNamespace, executor: str
) -> None:
    steps = 20
    errors: list[BaseException] = []

    def run(workload: Workload) -> None:
        try:
            for _ in range(steps):
                workload.compute_loss().backward()
        except BaseException as error:
            errors.append(error)

    with ExitStack() as stack:
        plan, workloads = _plan(zoo, executor), [_workload(zoo) for _ in "ab"]
        applied = [stack.enter_context(Applied(plan, w.model)) for w in workloads]
        alone = set()
        for workload, one in zip(workloads, applied, strict=True):
            workload.compute_loss().backward()
            assert one.swap is not None
            alone.add(one.swap.statistics().moves)
            one.swap.reset_statistics()
        threads = [threading.Thread(target=run, args=(workload,)) for workload in workloads]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        (moves,) = alone
        for one in applied:
            assert one.swap is not None and one.swap.statistics().moves == steps * moves > 0


def test_the_plans_of_one_model_share_host_memory(zoo: SimpleNamespace) -> None:
    plan, workload, other = _plan(zoo, "module"), _workload(zoo), _workload(zoo)
    arena = arena_for(plan, workload.model)
    assert arena_for(plan, workload.model) is arena
    assert arena_for(plan, other.model) is not arena


@pytest.mark.parametrize("executor", ["module", "graph"])
def test_a_backward_after_the_plan_was_taken_off_found_nothing(
    zoo: SimpleNamespace, executor: str, assert_same: Any
) -> None:
    plan, workload, plain = _plan(zoo, executor), _workload(zoo), _workload(zoo)
    torch.manual_seed(3)
    plain.compute_loss().backward()
    with Applied(plan, workload.model) as applied:
        torch.manual_seed(3)
        loss = workload.compute_loss()
    loss.backward()
    assert_same(_gradients(workload), _gradients(plain))
    assert applied._arena is not None and applied._arena.used_bytes == 0


@pytest.mark.parametrize("executor", ["module", "graph"])
def test_a_plan_ended_the_step_where_an_older_loss_was_kept(
    zoo: SimpleNamespace, executor: str, assert_same: Any
) -> None:
    plan, workload, plain = _plan(zoo, executor), _workload(zoo), _workload(zoo)
    for each in (plain, workload):
        with ExitStack() as stack:
            if each is workload:
                applied = stack.enter_context(Applied(plan, each.model))
            torch.manual_seed(3)
            losses = [each.compute_loss() for _ in range(2)]
            torch.stack(losses).sum().backward()
    assert_same(_gradients(workload), _gradients(plain))
    assert applied.swap is not None
    done = applied.swap.statistics()
    assert done.stayed > 0 and done.host_bytes < 1.05 * plan.host_bytes


@pytest.mark.parametrize("executor", ["module", "graph"])
def test_the_host_budget_holds_all_that_is_taken(zoo: SimpleNamespace, executor: str) -> None:
    # A budget of exactly what it takes is enough to the planner.
    exactly = _plan(zoo, executor).host_bytes
    plan, workload = _plan(zoo, executor, host_budget=exactly), _workload(zoo)
    with Applied(plan, workload.model) as applied:
        workload.compute_loss().backward()
        assert applied.swap is not None
        statistics = applied.swap.statistics()
    assert 0 < statistics.host_highest_bytes <= statistics.host_bytes <= exactly
    assert statistics.stayed == 0


@pytest.mark.parametrize("executor", ["module", "graph"])
def test_tensors_of_odd_sizes_found_no_room_in_a_budget_of_what_they_have(
    zoo: SimpleNamespace, executor: str
) -> None:
    """On the host each is rounded up, and the planner added up what they have."""

    def workload() -> Workload:
        made: Workload = zoo.workload(
            lambda: zoo.Stack(blocks=2, width=63), lambda: torch.randn(61, 33, 8)
        )
        return made

    def plan(**limits: Any) -> Plan:
        return memfit.plan(workload(), BUDGET, strategy="swap", executor=executor, **limits)

    exactly = plan().host_bytes
    with pytest.raises(InfeasibleError) as refused:
        plan(host_budget=exactly // 2)
    assert f"--host-budget {exactly}" in str(refused.value.hint)
    trained = workload()
    with Applied(plan(host_budget=exactly), trained.model) as applied:
        trained.compute_loss().backward()
        assert applied.swap is not None
        done = applied.swap.statistics()
    assert done.moves > 0 and done.stayed == 0 and done.host_bytes <= exactly
    assert done.host_highest_bytes > done.out.bytes, "sizes are odd"


def test_host_memory_in_pieces_grew_past_its_budget(zoo: SimpleNamespace) -> None:
    """By what was asked for, each time, as long as little of it was in use."""
    budget = int(1.015 * _plan(zoo, "module").host_bytes)
    arena = arena_for(_plan(zoo, "module", host_budget=budget), _workload(zoo).model)
    piece = budget // 10
    slots = [arena.take(piece) for _ in range(9)]
    for slot in slots[::2]:
        arena.give(slot, None)
    for _ in range(3):
        with pytest.raises(HostMemoryError):
            arena.take(3 * piece)
    assert arena.capacity_bytes <= budget


def test_the_plans_of_two_shapes_took_host_memory_each(zoo: SimpleNamespace) -> None:
    """One host budget was given for the fitted step, and each shape took up to that."""
    workload = _workload(zoo)
    budget = int(2.2 * _plan(zoo, "module").host_bytes)
    small, large = workload.batch, torch.randn(128, 32, 8)
    with memfit.fit_workload(
        workload, BUDGET, strategy="swap", executor="module", host_budget=budget, steps=1
    ) as fitted:
        first = fitted.applied
        fitted.step(large)
        second = fitted.applied
        assert second is not first and second.plan.host_bytes > budget / 2
        assert first._arena is second._arena is not None
        for batch in (small, large):
            fitted.step(batch)
            assert fitted.applied.swap is not None
            done = fitted.applied.swap.statistics()
            assert done.moves > 0 and done.stayed == 0
            assert done.host_bytes <= budget
