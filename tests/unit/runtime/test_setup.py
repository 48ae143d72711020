"""Techniques of the loss and the optimizer, put on a model and taken off again."""

from __future__ import annotations

from itertools import chain, combinations
from typing import Any

import pytest
import torch

from memfit.errors import UsageError
from memfit.measure.step import run_step, untouched
from memfit.planning.techniques import APPROXIMATE, INT8_WEIGHTS, ROUNDED_STATE, STEP
from memfit.runtime.lowbit.int8_weights import Int8Weights
from memfit.runtime.setup import Setup
from memfit.targets import resolve_target
from memfit.workload import Workload

SIZES = {"n_layer": "2", "n_embd": "32", "n_head": "2", "vocab_size": "200"}
MODULES = ("transformer.h.0", "transformer.h.1")
EXACT = [name for name in STEP if name not in (*APPROXIMATE, "step_on_host")]
SUBSETS = list(chain.from_iterable(combinations(EXACT, n) for n in range(len(EXACT) + 1)))


def gpt2() -> Workload:
    return resolve_target(
        "transformers:gpt2", device="cpu", batch=2, seq=16, overrides=SIZES, optimizer="adamw"
    )


def trained(workload: Workload, setup: Setup | None) -> dict[str, torch.Tensor]:
    """The state after three steps, and the optimizer's."""
    with untouched(workload):
        if setup is not None:
            setup.install()
        for _ in range(3):
            run_step(workload)
        if setup is not None:
            setup.undo()
        state = {n: t.clone() for n, t in workload.model.state_dict().items()}
        for n, p in workload.model.named_parameters():
            state |= {f"{n} {k}": v.clone() for k, v in workload.optimizer.state[p].items()}
        return state


@pytest.mark.parametrize("names", SUBSETS, ids=",".join)
def test_training_goes_on_as_without_it(names: tuple[str, ...]) -> None:
    workload = gpt2()
    expected = trained(workload, None)
    actual = trained(workload, Setup(names, workload.model, workload.optimizer, MODULES, 2**12))
    tolerance = 1e-4 if "tiled_loss" in names else 0.0  # sums in another order, beside Adam's roots
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance, msg=name)


def test_parameters_step_by_segment_and_the_rest_together() -> None:
    workload = gpt2()
    setup = Setup(("step_in_backward",), workload.model, workload.optimizer, MODULES)
    with setup:
        assert setup.in_backward is not None
        groups = setup.in_backward.groups
    assert [len(g) for g in groups[:2]] == [12, 12]
    assert sum(len(g) for g in groups) == len(list(workload.model.parameters()))
    assert setup.in_backward is None


def test_gradients_can_be_held() -> None:
    workload = gpt2()
    with untouched(workload), Setup(EXACT, workload.model, workload.optimizer, MODULES) as setup:
        with setup.holding_gradients():
            workload.compute_loss().backward()
        assert all(p.grad is not None for p in workload.model.parameters())


@pytest.mark.parametrize("name", ROUNDED_STATE)
@pytest.mark.parametrize("others", [(), ("step_in_backward",)])
def test_state_in_few_bits_is_near(name: str, others: tuple[str, ...]) -> None:
    workload = gpt2()
    expected = trained(workload, None)
    names = (*others, name)
    actual = trained(workload, Setup(names, workload.model, workload.optimizer, MODULES))
    for key in workload.model.state_dict():
        torch.testing.assert_close(actual[key], expected[key], rtol=0.05, atol=2e-3, msg=key)


@pytest.mark.parametrize("others", [(), ("step_in_backward",)])
def test_stepping_on_the_cpu_is_the_same_there(others: tuple[str, ...]) -> None:
    workload = gpt2()  # of Adam's updates those by gradients of noise would be noise
    workload.optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1, momentum=0.9)
    expected = trained(workload, None)
    names = (*others, "step_on_host")
    actual = trained(workload, Setup(names, workload.model, workload.optimizer, MODULES))
    for key in workload.model.state_dict():
        torch.testing.assert_close(actual[key], expected[key], rtol=1e-5, atol=1e-6, msg=key)


def test_one_place_for_the_state() -> None:
    workload = gpt2()
    setup = Setup(("optimizer_offload", "optim_8bit"), workload.model, workload.optimizer)
    with pytest.raises(UsageError, match="two places"):
        setup.install()


@pytest.mark.parametrize("name", INT8_WEIGHTS)
def test_int8_weights_have_the_scales_and_zero_points_of_their_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions were there, and no name by which they could be asked for."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    model[0].requires_grad_(False)
    made: list[Int8Weights] = []

    def watched(*given: Any, **options: Any) -> Int8Weights:
        made.append(Int8Weights(*given, **options))
        return made[-1]

    monkeypatch.setattr("memfit.runtime.setup.Int8Weights", watched)
    with Setup((name,), model):
        (weight,) = made[0].quantized().values()
        assert weight.scale.numel() == (1 if "per_tensor" in name else 4)
        assert (weight.zero_point is not None) == ("asymmetric" in name)
        torch.testing.assert_close(weight.dequantize(), model[0].weight, rtol=0, atol=0.01)
    with pytest.raises(UsageError, match="two forms of the same weights"):
        Setup(INT8_WEIGHTS[:2], model).install()


def test_techniques_of_the_optimizer_need_it() -> None:
    with pytest.raises(UsageError, match="needs the optimizer"):
        Setup(("optimizer_offload",), gpt2().model).install()


def test_a_model_without_a_head_is_refused_and_left_alone() -> None:
    model = torch.nn.Conv1d(2, 2, 1)
    with pytest.raises(UsageError, match="no linear layer"):
        Setup(("tiled_loss",), model).install()
    assert "forward" not in model.__dict__
