"""What a fitted step that ends in an exception leaves behind: nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.fitted import Fitted
from memfit.workload import Workload


def _break(_: torch.Tensor) -> None:
    raise ValueError("on purpose")


def _fragile(x: torch.Tensor) -> torch.Tensor:
    """The same, but a backward fails when it comes here."""
    x = x.clone()
    x.register_hook(_break)
    return x


class _Loss:
    """The mean square; `fails` says in which pass it does not come to its end."""

    fails: str | None = None

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        output = model(batch)
        if self.fails == "forward":
            raise ValueError("on purpose")
        loss: torch.Tensor = output.float().square().mean()
        if self.fails == "backward":
            return _fragile(loss)
        return loss


def _workload(zoo: SimpleNamespace, loss: _Loss) -> Workload:
    made: Workload = zoo.workload(
        lambda: zoo.Stack(blocks=2, width=64), lambda: torch.randn(64, 32, 8)
    )
    return replace(made, loss_fn=loss)


def _same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.fixture(params=["module", "graph"])
def swapping(zoo: SimpleNamespace, request: pytest.FixtureRequest) -> Iterator[Fitted]:
    """A fitted step that moves to the host what it can."""
    workload = _workload(zoo, _Loss())
    options = {"strategy": "swap", "executor": request.param, "steps": 1}
    fitted = memfit.fit_workload(workload, 10**9, **options)
    yield fitted
    fitted.undo()


def _used_bytes(fitted: Fitted) -> int:
    assert fitted.applied._arena is not None
    return fitted.applied._arena.used_bytes


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_the_loss_that_someone_kept_ended_the_next_step(
    zoo: SimpleNamespace, swapping: Fitted, where: str
) -> None:
    plain = _workload(zoo, _Loss())
    loss: Any = swapping.workload.loss_fn
    plain.model.load_state_dict(swapping.workload.model.state_dict())
    plain.optimizer.load_state_dict(swapping.workload.optimizer.state_dict())
    kept = []
    for _ in range(2):
        loss.fails = where
        with pytest.raises(ValueError, match="on purpose") as error:
            swapping.step(swapping.workload.batch)
        kept.append(error.value)
        assert _used_bytes(swapping) == 0
        loss.fails = None
    swapping.applied.swap.reset_statistics()  # type: ignore[union-attr]
    torch.manual_seed(3)
    found = swapping.step(swapping.workload.batch)
    torch.manual_seed(3)
    expected = plain.compute_loss()
    expected.backward()
    plain.optimizer.step()
    _same(found, expected.detach())
    _same(list(swapping.workload.model.parameters()), list(plain.model.parameters()))
    done = swapping.applied.swap.statistics()  # type: ignore[union-attr]
    assert done.moves == done.retrievals > 0 and done.stayed == 0


def test_a_step_beside_another_graph_of_the_model_ended_in_an_error(swapping: Fitted) -> None:
    workload = swapping.workload
    other = workload.compute_loss()
    swapping.step(workload.batch)
    workload.loss_fn.fails = "backward"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="on purpose"):
        swapping.step(workload.batch)
    workload.loss_fn.fails = None  # type: ignore[attr-defined]
    del other
    assert _used_bytes(swapping) == 0


def test_gradients_of_a_failed_backward_were_added_to_those_of_the_next_step(
    zoo: SimpleNamespace,
) -> None:
    fitted, plain = (zoo.workload(zoo.Stack) for _ in "ab")

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("on purpose")

    with memfit.fit_workload(fitted, 10**9, steps=1, executor="module") as at_work:
        hook = fitted.model.stem.weight.register_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            at_work.step(fitted.batch)
        hook.remove()
        assert all(p.grad is None for p in fitted.model.parameters())
        torch.manual_seed(3)
        at_work.step(fitted.batch)
    torch.manual_seed(3)
    plain.compute_loss().backward()
    plain.optimizer.step()
    _same(list(fitted.model.parameters()), list(plain.model.parameters()))
