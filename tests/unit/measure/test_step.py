"""The step that measurements run, and the state it must not disturb."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memfit.errors import ModelError, UsageError
from memfit.measure.step import explained_errors, run_first_steps, run_step, untouched
from memfit.workload import Workload


def _state(workload: Workload) -> dict[str, Any]:
    model, optimizer = workload.model, workload.optimizer
    return copy.deepcopy(
        {
            "model": model.state_dict(),
            "gradients": {n: p.grad for n, p in model.named_parameters()},
            "optimizer": [dict(s) for s in optimizer.state.values()],
            "rates": [g["lr"] for g in optimizer.param_groups],
            "random": torch.get_rng_state(),
            "modes": [float(m.training) for m in model.modules()],
        }
    )


def _same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_step_trains_and_leaves_no_gradients(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    phases: list[str] = []
    before = copy.deepcopy(workload.model.state_dict())
    loss = run_step(workload, phase=phases.append)
    assert not loss.requires_grad
    assert phases == ["forward", "backward", "optimizer", "end"]
    assert all(p.grad is None for p in workload.model.parameters())
    assert not torch.equal(workload.model.state_dict()["head.weight"], before["head.weight"])


def test_accumulating_runs_that_many_backwards(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    phases: list[str] = []
    run_step(workload, accumulate=3, phase=phases.append)
    assert phases == [*["forward", "backward"] * 3, "optimizer", "end"]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("warm", [False, True])
def test_untouched_restores(zoo: SimpleNamespace, optimizer: Any, warm: bool) -> None:
    workload = zoo.workload(zoo.ConvNet, zoo.images, optimizer=optimizer)
    if warm:
        run_step(workload)
        workload.compute_loss().backward()
    before = _state(workload)
    pointers = [p.data_ptr() for p in workload.model.parameters()]
    with untouched(workload):
        assert all(p.grad is None for p in workload.model.parameters())
        workload.model.eval()
        run_step(workload)
        workload.optimizer.param_groups[0]["lr"] = 99.0
        workload.model.train()
        run_step(workload)
        torch.rand(3)
        with pytest.raises(AssertionError):
            _same(_state(workload), before)
    _same(_state(workload), before)
    assert [p.data_ptr() for p in workload.model.parameters()] == pointers


def test_untouched_restores_after_an_exception(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.ConvNet, zoo.images)
    before = _state(workload)
    with pytest.raises(ValueError, match="mine"), untouched(workload):
        run_step(workload)
        raise ValueError("mine")
    _same(_state(workload), before)


def test_untouched_restores_a_buffer_that_another_took_the_place_of(zoo: SimpleNamespace) -> None:
    """`self.average = ...` in a forward: the old tensor was restored, and was nobody's any more."""
    workload = zoo.workload(zoo.Stack)
    model = workload.model
    model.register_buffer("average", torch.zeros(()))
    own = model.average
    with untouched(workload):
        model.average = model.average + 1
    assert model.average is own
    _same(own, torch.zeros(()))


def test_untouched_restores_a_scaler(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    workload.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    with untouched(workload):
        run_step(workload)
        assert workload.scaler.get_scale() == 16.0
    assert workload.scaler.get_scale() == 8.0


def test_first_steps_go_on_until_a_scaler_skips_none(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    loss = workload.loss_fn
    workload.loss_fn = lambda model, batch: 1e6 * loss(model, batch)
    workload.optimizer = torch.optim.Adam(workload.model.parameters())
    workload.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-60)
    run_step(workload)
    assert not workload.optimizer.state, "skipped"
    workload.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-60)
    run_first_steps(workload, 1)
    assert workload.optimizer.state
    endless = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=1 - 2.0**-20)
    workload.optimizer = torch.optim.Adam(workload.model.parameters())
    workload.scaler = endless
    run_first_steps(workload)
    assert not workload.optimizer.state


def test_errors_of_the_users_forward_are_explained(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    with pytest.raises(ModelError, match="RuntimeError: mat1 and mat2") as refusal:
        with explained_errors(workload):
            workload.compute_loss(torch.zeros(2, 3))
    assert refusal.value.hint and isinstance(refusal.value.__cause__, RuntimeError)
    with pytest.raises(torch.OutOfMemoryError), explained_errors(workload):
        raise torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda m, b: m(b), "a tensor of shape"),
        (lambda m, b: 3.0, "returned a float"),
        (lambda m, b: m(b).sum().detach(), "does not depend on any trainable parameter"),
    ],
)
def test_losses_that_cannot_be_trained(zoo: SimpleNamespace, loss: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says) as refusal:
        zoo.workload(zoo.Stack, loss=loss).compute_loss()
    assert refusal.value.hint


def test_workloads_that_make_no_sense(zoo: SimpleNamespace) -> None:
    model = zoo.Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = zoo.sequences()
    wrong: list[tuple[Any, str]] = [
        ((zoo.squared, model, optimizer, batch), "not a torch.nn.Module"),
        ((model, 3, optimizer, batch), "not a function"),
        ((model, zoo.squared, None, batch), "not a torch.optim.Optimizer"),
        ((model, zoo.squared, optimizer, batch.to("meta")), "a tensor on meta"),
    ]
    for arguments, says in wrong:
        with pytest.raises(Exception, match=says) as refusal:
            Workload(*arguments)
        assert refusal.value.hint  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match="no trainable parameters"):
        Workload(nn.Linear(2, 2).requires_grad_(False), zoo.squared, optimizer, batch)
    split = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ModelError, match="several devices"):
        Workload(split, zoo.squared, optimizer, batch)


def test_an_optimizer_that_needs_a_closure_is_refused_by_name(zoo: SimpleNamespace) -> None:
    """It failed in the middle of the first step, with the advice to run the backward alone."""
    model = zoo.Stack()
    with pytest.raises(UsageError, match="LBFGS") as refusal:
        Workload(model, zoo.squared, torch.optim.LBFGS(model.parameters()), zoo.sequences())
    assert "AdamW" in str(refusal.value.hint)
