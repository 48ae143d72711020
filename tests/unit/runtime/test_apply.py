"""A plan at work on a model, and off it again."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit import api
from memfit.capture.profile import profile_workload
from memfit.errors import PlanFileError, UsageError
from memfit.ir.plan import Plan
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime.apply import Applied
from memfit.runtime.calls import Route, Router, replaced_forward
from memfit.runtime.recompute import Recompute
from memfit.runtime.signature import batch_signature, is_no_larger, model_signature
from memfit.workload import Workload, unwrap


def _plan(workload: Workload, strategy: str = "all") -> Plan:
    return make_plan(profile_workload(workload, rounds=1), Goal(strategy=strategy))


def test_apply_as_a_context_manager_restores_everything(
    zoo: SimpleNamespace, run_numbers: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    plain = zoo.workload(zoo.PreActivationNet, zoo.images)
    planned = zoo.workload(zoo.PreActivationNet, zoo.images)
    model = planned.model
    plan = _plan(planned, "interval")
    assert plan.inplace_off
    before = {n: dict(m.__dict__) for n, m in model.named_modules()}
    with memfit.apply(plan, model, planned.optimizer) as applied:
        assert applied.router is not None
        assert not any(block.relu.inplace for block in model.blocks)
        actual = run_numbers(planned, 2)
        assert applied.router.engine.replays >= 2
        assert model.state_dict().keys() == plain.model.state_dict().keys()
    after = {n: dict(m.__dict__) for n, m in model.named_modules()}
    assert {n: sorted(d) for n, d in after.items()} == {n: sorted(d) for n, d in before.items()}
    assert all(block.relu.inplace for block in model.blocks)
    assert_same(actual, run_numbers(plain, 2))


def test_apply_has_the_allocator_that_the_plan_was_made_for(
    zoo: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = zoo.workload(zoo.Stack)
    plan = _plan(workload)
    asked: list[torch.device] = []
    monkeypatch.setattr(api, "prefer_expandable_segments", asked.append)
    with memfit.apply(plan, workload.model):
        pass
    assert asked == [torch.device("cpu")]


@pytest.mark.parametrize("executor", ["module", "graph"])
def test_a_copy_of_a_model_with_a_plan_at_work_is_a_model_of_its_own(
    zoo: SimpleNamespace, executor: str
) -> None:
    workload = zoo.workload(zoo.Stack)
    model, batch = workload.model, workload.batch
    plan = make_plan(profile_workload(workload, rounds=1, executor=executor), Goal(strategy="all"))
    signature = inspect.signature(model.forward)
    with memfit.apply(plan, model):
        twin = copy.deepcopy(model)
        saved = io.BytesIO()
        torch.save(model, saved)
        assert inspect.signature(model.forward) == signature
        averaged = torch.optim.swa_utils.AveragedModel(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    for other in (twin, loaded, averaged.module):
        loss = workload.loss_fn(other, batch)
        loss.backward()
        assert all(p.grad is not None for p in other.parameters())
        assert not any(p.grad is not None for p in model.parameters())
        with torch.no_grad():
            assert not torch.equal(loss, workload.loss_fn(model, batch))
    again = io.BytesIO()
    torch.save(twin, again)  # a copy can be saved as well, and planned
    assert memfit.fit_workload(replace(workload, model=twin), "99%", steps=1).plan


def test_a_forward_of_its_own_goes_with_the_copy(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    block = workload.model.blocks[0]
    block.forward = doubled
    with replaced_forward(block, lambda forward: lambda x: forward(x) + 1):
        x = torch.ones(2)
        assert torch.equal(block(x), 2 * x + 1)
        assert torch.equal(copy.deepcopy(block)(x), 2 * x)
    assert block.forward is doubled


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_leaving_by_an_exception_restores_too(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    plan = _plan(workload)
    with pytest.raises(ValueError, match="mine"), memfit.apply(plan, workload.model):
        assert "forward" in workload.model.blocks[0].__dict__
        raise ValueError("mine")
    assert not any("forward" in m.__dict__ for m in workload.model.modules())


def test_a_forward_that_the_user_replaced_comes_back(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    block = workload.model.blocks[0]
    original, calls = block.forward, []

    def mine(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return original(x)

    block.forward = mine
    plan = _plan(workload)
    calls.clear()
    with memfit.apply(plan, workload.model):
        workload.compute_loss().backward()
    assert len(calls) == 2, "in the forward and in its replay"
    assert block.forward is mine


def test_apply_can_be_entered_again_and_undo_twice_is_harmless(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    applied = memfit.apply(_plan(workload), workload.model)
    for _ in range(2):
        with applied:
            workload.compute_loss().backward()
    applied.undo()
    applied.undo()
    assert applied.router is None


def test_a_block_within_its_own_block_is_refused(zoo: SimpleNamespace) -> None:
    """The inner block took the plan off: the rest of the outer one ran without it, silently."""
    workload = zoo.workload(zoo.Stack)
    applied = memfit.apply(_plan(workload), workload.model)
    with applied:
        with pytest.raises(UsageError, match=r"this Applied is at work already\nhint: "), applied:
            pass
        with pytest.raises(UsageError, match=r"at work already\nhint: "):
            applied.install()
        assert applied.router is not None
        workload.compute_loss().backward()
        assert applied.router.engine.replays
    assert applied.router is None
    with applied.install():
        pass
    assert applied.router is None, "a block takes off what was installed before it"
    with applied:
        applied.undo()
        with applied:
            assert applied.router is not None
    assert not any("forward" in m.__dict__ for m in workload.model.modules())


def test_a_saved_plan_runs_as_the_one_that_was_made(
    zoo: SimpleNamespace,
    tmp_path: Path,
    run_numbers: Callable[..., Any],
    assert_same: Callable[..., None],
) -> None:
    plain, planned = zoo.workload(zoo.CountingNet), zoo.workload(zoo.CountingNet)
    _plan(planned).save(tmp_path / "plan.json")
    plan = memfit.Plan.load(tmp_path / "plan.json")
    assert any(s.mutated_buffers for s in plan.segments)
    with memfit.apply(plan, planned.model) as applied:
        actual = run_numbers(planned, 2)
        assert applied.router is not None and applied.router.engine.replays
    assert_same(actual, run_numbers(plain, 2))


def test_a_plan_for_a_model_called_twice(
    zoo: SimpleNamespace, run_numbers: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    def contrast(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) - model(batch.flip(0))).square().mean()

    plain, planned = (zoo.workload(zoo.Siamese, loss=contrast) for _ in range(2))
    plan = _plan(planned)
    assert plan.model_calls == 2
    with memfit.apply(plan, planned.model) as applied:
        actual = run_numbers(planned, 2)
        assert applied.router is not None
        assert applied.router.engine.replays == 2 * 6
    assert_same(actual, run_numbers(plain, 2))


def test_plans_for_something_else_are_refused(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    plan = _plan(workload)
    with pytest.raises(PlanFileError, match="modules or parameter shapes differ") as refusal:
        memfit.apply(plan, zoo.Stack(blocks=3))
    assert refusal.value.hint and refusal.value.exit_code == 2
    with pytest.raises(PlanFileError, match="modules or parameter shapes differ"):
        memfit.apply(plan, zoo.Stack(width=32))
    with pytest.raises(PlanFileError, match=r"made with torch 1\.0"):
        memfit.apply(replace(plan, torch="1.0"), workload.model)
    with pytest.raises(PlanFileError, match="no module 'stem'"):
        Applied(plan, nn.Linear(2, 2)).install()
    memfit.apply(replace(plan, torch=plan.torch.split("+")[0] + "+cu130"), workload.model)


def test_plans_that_were_changed_are_refused(zoo: SimpleNamespace) -> None:
    """They need not come from a file: ZeroDivisionError, IndexError or nothing at all was said."""
    workload = zoo.workload(zoo.Stack)
    plan = memfit.plan(workload, "100%", executor="graph")
    for changes, says in (
        ({"variants": ()}, "there are 0 variants"),
        ({"segments": plan.segments[:-1]}, "it has 5 segments and was made with 6"),
    ):
        changed = replace(plan, **changes)
        with pytest.raises(PlanFileError, match=rf"{says}\nhint: "):
            memfit.apply(changed, workload.model)
        with pytest.raises(PlanFileError, match=rf"{says}\nhint: "):
            memfit.fit_workload(workload, None, plan=changed)
    with pytest.raises(UsageError, match=r"in 0 parts\nhint: "):
        memfit.fit_workload(workload, None, plan=replace(plan, split=0))


def test_a_plan_at_work_elsewhere_in_the_model_is_seen(zoo: SimpleNamespace) -> None:
    """A part of a planned model seemed to run under no_grad or in checkpoints of its own."""
    workload = zoo.workload(zoo.Stack)
    model, plan = workload.model, _plan(workload)
    inner = nn.Sequential(*model.blocks)
    x = torch.randn(4, 16)

    def planned(part: nn.Module, batch: torch.Tensor) -> Workload:
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        return Workload(part, lambda model, batch: model(batch).square().mean(), optimizer, batch)

    for part, batch, says in (
        (model.blocks[0], x, "on the Stack that this Block is a part of"),
        (nn.Sequential(model), workload.batch, "on a part of this Sequential, a Stack"),
        (inner, x, "on a Stack that shares segments with this Sequential"),
    ):
        with memfit.apply(plan, model):
            for verb in (
                memfit.profile,
                lambda workload: memfit.plan(workload, "80%"),
                lambda workload: memfit.fit_workload(workload, "80%"),
            ):
                with pytest.raises(UsageError, match=f"a plan is at work {says}\nhint: take it"):
                    verb(planned(part, batch))
        memfit.profile(planned(part, batch))
    with memfit.apply(plan, model), memfit.apply(plan, copy.deepcopy(model)):
        pass


def test_a_route_to_missing_modules_is_refused_and_leaves_nothing(zoo: SimpleNamespace) -> None:
    model = zoo.Stack()
    router = Router(model, Route([("stem", 0, 1), ("tail", 0, 1)]), Recompute([], {}))
    with pytest.raises(PlanFileError, match="'tail'"):
        router.install()
    router.uninstall()
    assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("executor", ["module", "graph"])
@pytest.mark.parametrize("kind", ["Stack", "ConvNet"])
def test_distributed_data_parallel(
    zoo: SimpleNamespace,
    run_numbers: Callable[..., Any],
    assert_same: Callable[..., None],
    kind: str,
    executor: str,
) -> None:
    def build() -> Workload:
        batch = zoo.images if kind == "ConvNet" else zoo.sequences
        workload = zoo.workload(getattr(zoo, kind), lambda: batch(16))
        wrapped = nn.parallel.DistributedDataParallel(workload.model)
        return replace(workload, model=wrapped)

    plain, planned = build(), build()
    profile = profile_workload(planned, rounds=1, executor=executor)
    plan = make_plan(profile, Goal(strategy="all" if executor == "module" else "optimal"))
    assert all(not s.module.startswith("module.") for s in plan.segments)
    how = "recompute" if executor == "module" else "partial"
    assert any(s.decision == how for s in plan.segments)
    with memfit.apply(plan, planned.model) as applied:
        actual = run_numbers(planned, 3)
        assert applied.router is not None
        assert executor == "graph" or applied.router.engine.replays
    assert_same(actual, run_numbers(plain, 3))


def test_unwrap_and_signatures(zoo: SimpleNamespace) -> None:
    model = zoo.Stack()
    compiled = torch.compile(model)
    assert unwrap(compiled) is model
    assert model_signature(compiled) == model_signature(model)
    other = copy.deepcopy(model)
    assert model_signature(other) == model_signature(model), "values do not matter"
    other.head.weight.requires_grad_(False)
    assert model_signature(other) != model_signature(model)
    assert model_signature(copy.deepcopy(model).double()) != model_signature(model)


def test_batch_signatures_and_sizes() -> None:
    batch = {"x": torch.zeros(4, 8), "n": 3}
    assert batch_signature(batch) == "float32[4, 8] int"
    assert is_no_larger({"x": torch.zeros(2, 8), "n": 9}, batch)
    assert not is_no_larger({"x": torch.zeros(5, 8), "n": 3}, batch)
    assert not is_no_larger({"x": torch.zeros(4, 8, dtype=torch.float64), "n": 3}, batch)
    assert not is_no_larger({"x": torch.zeros(4, 8, 1), "n": 3}, batch)
    assert not is_no_larger({"x": 3, "n": 3}, batch)
    assert not is_no_larger([torch.zeros(4, 8), 3], batch)
