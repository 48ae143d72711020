"""State in few bits trains like state in full, within a tolerance, and leaves as plain state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from memfit.errors import UsageError
from memfit.measure.allocations import peak_above_start, record
from memfit.runtime.lowbit.log_codes import RELATIVE_ERROR
from memfit.runtime.lowbit.packed import Bits, Packed, packed_bytes
from memfit.runtime.lowbit.state import LowBitState
from memfit.runtime.optimizer.in_backward.step_in_backward import StepInBackward

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1.0, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=3e-3, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=3e-3),
    "adamw_foreach": partial(torch.optim.AdamW, lr=3e-3, foreach=True),
    "adamw_fused": partial(torch.optim.AdamW, lr=3e-3, fused=True),
}
TOLERANCE: dict[Bits, float] = {"8bit": RELATIVE_ERROR, "bf16_sr": 2**-7}


@pytest.fixture(params=OPTIMIZERS)
def any_optimizer(request: pytest.FixtureRequest) -> Any:
    """Each optimizer in turn."""
    return OPTIMIZERS[request.param]


@pytest.fixture(params=["8bit", "bf16_sr"])
def bits(request: pytest.FixtureRequest) -> Bits:
    """Each width in turn."""
    return request.param


def build(make: Any = OPTIMIZERS["adamw"]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64))
    return model, make(model.parameters())


def loss_of(model: torch.nn.Module, number: int) -> torch.Tensor:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(number))
    return (model(x) - x.roll(1, 1).sin()).square().mean()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    """The mean loss of the last ten steps."""
    losses = []
    for number in steps:
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return sum(losses[-10:]) / len(losses[-10:])


def tensors(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    return [
        (key, value)
        for state in optimizer.state_dict()["state"].values()
        for key, value in state.items()
        if key != "step"
    ]


def close(actual: Any, expected: Any, bits: Bits) -> None:
    """The state is another's within the tolerance of one round trip."""
    assert len(actual) == len(expected) > 0
    for (key, value), (other_key, other) in zip(actual, expected, strict=True):
        assert key == other_key and type(value) is torch.Tensor and value.dtype == other.dtype
        smallest = float(other.abs().max()) * 2**-15
        torch.testing.assert_close(value, other, rtol=TOLERANCE[bits] * 1.001, atol=smallest)


def test_trains_like_the_plain_optimizer(any_optimizer: Any, bits: Bits) -> None:
    expected = train(*build(any_optimizer), range(100))
    model, optimizer = build(any_optimizer)
    untrained = float(loss_of(model, 0).detach())
    with LowBitState(optimizer, [list(model[0].parameters())], bits=bits):
        found = train(model, optimizer, range(100))
    assert expected < untrained / 2
    assert found == pytest.approx(expected, rel=0.02)


def test_undo_gives_plain_state(any_optimizer: Any, bits: Bits) -> None:
    model, optimizer = build(any_optimizer)
    train(model, optimizer, range(5))
    before = copy.deepcopy(tensors(optimizer))
    low = LowBitState(optimizer, bits=bits).install()
    packed = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Packed)]
    assert len(packed) >= 2
    low.undo()
    low.undo()
    close(tensors(optimizer), before, bits)
    train(model, optimizer, range(5, 7))


def test_a_plain_optimizer_loads_the_state(any_optimizer: Any, bits: Bits) -> None:
    model, optimizer = build(any_optimizer)
    with LowBitState(optimizer, bits=bits):
        train(model, optimizer, range(20))
        saved = copy.deepcopy(optimizer.state_dict())
        plain_model, plain = build(any_optimizer)
        plain_model.load_state_dict(model.state_dict())
        plain.load_state_dict(saved)
        close(tensors(plain), tensors(optimizer), bits)
        expected = train(plain_model, plain, range(20, 40))
        assert train(model, optimizer, range(20, 40)) == pytest.approx(expected, rel=0.05)


def test_loads_the_state_of_a_plain_optimizer(any_optimizer: Any, bits: Bits) -> None:
    plain_model, plain = build(any_optimizer)
    train(plain_model, plain, range(20))
    model, optimizer = build(any_optimizer)
    with LowBitState(optimizer, bits=bits):
        train(model, optimizer, range(3))
        model.load_state_dict(plain_model.state_dict())
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        close(tensors(optimizer), tensors(plain), bits)
        expected = train(plain_model, plain, range(20, 40))
        assert train(model, optimizer, range(20, 40)) == pytest.approx(expected, rel=0.05)


def test_steps_in_backward(bits: Bits) -> None:
    expected = train(*build(), range(100))
    model, optimizer = build()
    groups = [[p] for p in model.parameters()]
    with (
        LowBitState(optimizer, groups, bits=bits) as low,
        StepInBackward(optimizer, groups, stepper=low) as stepper,
    ):
        losses = []
        for number in range(100):
            loss = loss_of(model, number)
            stepper.backward(loss)
            losses.append(float(loss.detach()))
    assert sum(losses[-10:]) / 10 == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("kind", ["adamw", "adamw_fused"])
def test_a_step_that_overflows_is_left_out(kind: str, bits: Bits) -> None:
    model, optimizer = build(OPTIMIZERS[kind])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with LowBitState(optimizer, bits=bits):
        train(model, optimizer, range(3))
        weights, state = copy.deepcopy((model.state_dict(), tensors(optimizer)))
        for bad in (True, False):
            scaler.scale(loss_of(model, 3)).backward()
            if bad:
                model[0].weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            same = torch.equal(model[0].weight, weights["0.weight"])
            assert same is bad
            if bad:
                close(tensors(optimizer), state, bits)


def test_the_users_random_numbers_stay(bits: Bits) -> None:
    model, optimizer = build()
    with LowBitState(optimizer, bits=bits):
        before = torch.get_rng_state()
        train(model, optimizer, range(3))
        assert torch.equal(torch.get_rng_state(), before)


def test_the_same_seed_gives_the_same_numbers(bits: Bits) -> None:
    found = []
    for seed in (1, 1, 2):
        model, optimizer = build()
        with LowBitState(optimizer, bits=bits, seed=seed):
            found.append(train(model, optimizer, range(5)))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("trained", [True, False])
def test_footprint(bits: Bits, trained: bool) -> None:
    model, optimizer = build()
    if trained:
        train(model, optimizer, range(1))
    low = LowBitState(optimizer, [[p] for p in model.parameters()], bits=bits)
    elements = 2 * 2 * 64 * 128  # two weights, two averages each
    kept = {"8bit": elements + elements // 64, "bf16_sr": 2 * elements}[bits]
    rounding = {"8bit": 4 * (512 - 128), "bf16_sr": 0}[bits]
    assert low.footprint().removed_bytes == 4 * elements - kept - rounding
    assert low.footprint().working_bytes >= 2 * 4 * 64 * 128
    with low:
        train(model, optimizer, range(2))
        packed = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Packed)]
        held = sum(t.nbytes for t in tree_leaves(packed) if isinstance(t, torch.Tensor))
        assert held == kept


def test_a_step_holds_what_the_footprint_says(bits: Bits) -> None:
    parameter = torch.nn.Parameter(torch.ones(2048, 1024))  # two pieces
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    with LowBitState(optimizer, bits=bits) as low:
        optimizer.step()
        held = peak_above_start(record(optimizer.step, torch.device("cpu")))
        said = low.footprint().working_bytes
    assert 0.8 * said < held <= said + packed_bytes(parameter.numel(), bits)


def test_half_precision_and_channels_last() -> None:
    torch.manual_seed(0)
    model = torch.nn.Conv2d(32, 32, 3).to(torch.bfloat16, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.randn_like(model.weight)
    with LowBitState(optimizer):
        optimizer.step()
        before = copy.deepcopy(tensors(optimizer))
        optimizer.step()
    average = optimizer.state[model.weight]["exp_avg"]
    assert average.dtype == torch.bfloat16 and average.stride() == model.weight.stride()
    torch.testing.assert_close(before[0][1], 0.1 * model.weight.grad, rtol=0.1, atol=1e-4)


def test_a_parameter_added_later() -> None:
    model, optimizer = build()
    late = torch.nn.Parameter(torch.ones(64, 64))
    with LowBitState(optimizer):
        train(model, optimizer, range(2))
        optimizer.add_param_group({"params": [late]})
        late.grad = torch.ones_like(late)
        optimizer.step()
        assert isinstance(optimizer.state[late]["exp_avg"], Packed)
    assert type(optimizer.state[late]["exp_avg"]) is torch.Tensor


@pytest.mark.parametrize(
    ("make", "bits", "words"),
    [
        (torch.optim.Adagrad, "8bit", "Adagrad"),
        (partial(torch.optim.SGD, lr=0.1), "8bit", "without momentum"),
        (torch.optim.AdamW, "4bit", "4bit"),
    ],
)
def test_refusals(make: Any, bits: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refusal:
        LowBitState(build(make)[1], bits=bits)
    assert refusal.value.hint


def test_refuses_what_would_not_shrink() -> None:
    half = torch.nn.Linear(128, 128, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="16 bits"):
        LowBitState(torch.optim.AdamW(half.parameters()), bits="bf16_sr")
