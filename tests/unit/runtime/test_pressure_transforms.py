"""A valve and torch.func, which forbids hooks for saved tensors: the valve steps aside."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu
from torch.func import functional_call, grad, hessian, jacrev, vjp, vmap

import memfit
from memfit.errors import UsageError
from memfit.runtime.pressure.innards import hooks_in_force
from memfit.runtime.pressure.valve import Valve


def valve() -> Valve:
    return memfit.pressure(0, device="cpu", min_tensor_bytes=1, host_budget="1GiB")


def functions() -> tuple[Any, ...]:
    """What the valve replaces."""
    autograd = torch._C._autograd
    return autograd._saved_tensors_hooks_disable, autograd._saved_tensors_hooks_enable


@pytest.fixture(autouse=True)
def torch_is_as_it_was() -> Any:
    before = functions()
    yield
    assert functions() == before
    assert hooks_in_force() is None


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


MODEL = _model()


def _loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return functional_call(MODEL, parameters, (x,)).sum()


def _of_parameters() -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in _model().named_parameters()}


def _vjp() -> Any:
    weight = torch.arange(5.0, requires_grad=True)
    result, pull = vjp(lambda w: w.sin() * w, weight)
    (pulled,) = pull(torch.ones(5))
    return [result, pulled, torch.autograd.grad(pulled.sum(), weight)[0]]


def _within_a_step() -> Any:
    model = _model()
    hidden = model(torch.ones(3, 4))
    inner = grad(lambda h: (h.sin() * h).sum())(hidden)
    (inner * hidden).sum().backward()
    return [p.grad for p in model.parameters()]


TRANSFORMS: dict[str, Callable[[], Any]] = {
    "grad": lambda: list(grad(_loss)(_of_parameters(), torch.ones(3, 4)).values()),
    "gradients of each sample": lambda: list(
        vmap(grad(_loss), in_dims=(None, 0))(_of_parameters(), torch.eye(4)).values()
    ),
    "jacrev": lambda: [jacrev(lambda w: w.sin() * w)(torch.arange(5.0))],
    "hessian": lambda: [hessian(lambda w: (w**3).sum())(torch.arange(5.0))],
    "vjp": _vjp,
    "within a step": _within_a_step,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func_failed_in_a_valve(name: str) -> None:
    expected = TRANSFORMS[name]()
    weight = torch.ones(8, requires_grad=True)
    with valve() as forced:
        ours = hooks_in_force()
        actual = TRANSFORMS[name]()
        assert hooks_in_force() == ours is not None
        before = forced.statistics.swaps
        (weight * 2).exp().sin().exp().sin().exp().sum().backward()
        assert forced.statistics.swaps > before, "what comes after moves as ever"
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_hooks_come_back_when_a_transform_fails() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        assert hooks_in_force() is None
        raise ValueError("on purpose")

    with valve():
        ours = hooks_in_force()
        with pytest.raises(ValueError, match="on purpose"):
            grad(fails)(torch.ones(()))
        assert hooks_in_force() == ours
        with disable_saved_tensors_hooks("no hooks"), disable_saved_tensors_hooks("none here"):
            assert hooks_in_force() is None
            with pytest.raises(RuntimeError, match="none here"), save_on_cpu():
                pass
        assert hooks_in_force() == ours


def test_hooks_of_others_are_refused_as_without_a_valve() -> None:
    function = grad(lambda x: x.sin())
    with valve():
        ours = hooks_in_force()
        with save_on_cpu(), pytest.raises(RuntimeError, match="saved tensor hooks"):
            function(torch.ones(()))
        assert hooks_in_force() == ours
    with save_on_cpu(), valve():
        ours = hooks_in_force()
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            function(torch.ones(()))
        assert hooks_in_force() == ours


def test_another_thread_has_no_hooks_to_step_aside() -> None:
    results: list[torch.Tensor] = []

    def work() -> None:
        results.append(grad(lambda x: x.sin())(torch.zeros(())))
        assert hooks_in_force() is None

    with valve():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert results == [torch.ones(())]


def test_a_valve_inside_a_transform_is_refused_with_a_hint() -> None:
    def entered(x: torch.Tensor) -> torch.Tensor:
        with valve():
            return x.sin()

    with pytest.raises(UsageError, match=r"torch\.func") as caught:
        grad(entered)(torch.ones(()))
    assert caught.value.hint
    with valve():
        pass  # it is not at work


def test_a_compiled_transform_is_not_compiled_again() -> None:
    counters = torch._dynamo.utils.counters

    def function(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return grad(lambda p, x: ((x @ p["w"]).sin()).sum())(parameters, x)["w"] * 2

    parameters, x = {"w": torch.arange(4.0)}, torch.eye(4)
    for first_in_valve in (True, False):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        results = []
        for in_valve in (first_in_valve, not first_in_valve, first_in_valve):
            with valve() if in_valve else torch.enable_grad():
                results.append(compiled(parameters, x))
        assert counters["stats"]["unique_graphs"] == 1
        for result in results:
            assert torch.equal(result, function(parameters, x))
    torch._dynamo.reset()
