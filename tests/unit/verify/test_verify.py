"""The checks must notice what is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memfit.capture.profile import profile_workload
from memfit.ir.result import Numerics
from memfit.measure.timing import Timing
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime import recompute
from memfit.runtime.apply import Applied
from memfit.runtime.random_state import RandomState
from memfit.verify import numerics
from memfit.verify.budget import check_budget
from memfit.verify.deterministic import CUBLAS, deterministic
from memfit.verify.numerics import (
    SMALL,
    Numbers,
    check_numerics,
    compare,
    gradient_error,
)
from memfit.verify.speed import Speed, compare_speed
from memfit.workload import Workload


def _applied(workload: Workload, strategy: str = "all") -> Applied:
    profile = profile_workload(workload, rounds=1)
    return Applied(make_plan(profile, Goal(strategy=strategy)), workload.model)


def test_equal_numbers_are_called_equal(zoo: SimpleNamespace) -> None:
    for kind, batch in (("Stack", zoo.sequences), ("ConvNet", zoo.images)):
        workload = zoo.workload(getattr(zoo, kind), batch)
        numerics = check_numerics(workload, _applied(workload))
        assert numerics.bitwise_vs_unplanned
        assert (numerics.loss_max_abs_diff, numerics.grad_max_rel_diff) == (0.0, 0.0)
        assert numerics.note is None


def test_a_replay_with_other_random_numbers_is_noticed(
    zoo: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = zoo.workload(lambda: zoo.Stack(dropout=0.5))
    applied = _applied(workload)

    @contextmanager
    def not_replayed(self: RandomState) -> Iterator[None]:
        yield

    monkeypatch.setattr(RandomState, "replayed", not_replayed)
    numerics = check_numerics(workload, applied)
    assert not numerics.bitwise_vs_unplanned
    assert numerics.grad_max_rel_diff > 1e-3
    assert numerics.loss_max_abs_diff == 0.0, "the forward is right, only gradients are wrong"
    assert numerics.repeatable and numerics.note is None, "the model itself repeats"


def test_statistics_updated_twice_are_noticed(
    zoo: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = zoo.workload(zoo.ConvNet, zoo.images)
    applied = _applied(workload)

    @contextmanager
    def not_frozen(module: nn.Module) -> Iterator[None]:
        yield

    monkeypatch.setattr(recompute, "frozen_statistics", not_frozen)
    numerics = check_numerics(workload, applied)
    assert not numerics.bitwise_vs_unplanned


def test_a_model_that_does_not_repeat_itself_is_named(zoo: SimpleNamespace) -> None:
    calls = [0]

    def drifting(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return zoo.squared(model, batch) * (1 + 0.1 * calls[0])

    workload = zoo.workload(zoo.Stack, loss=drifting)
    numerics = check_numerics(workload, _applied(workload))
    assert not numerics.bitwise_vs_unplanned
    assert not numerics.repeatable
    assert numerics.note is not None and "does not repeat itself either" in numerics.note


def test_comparing_leaves_the_workload_as_it_was(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.ConvNet, zoo.images)
    applied = _applied(workload)
    before = {n: t.clone() for n, t in workload.model.state_dict().items()}
    state = torch.get_rng_state()
    check_numerics(workload, applied)
    check_budget(workload, applied, 10**12)
    compare_speed(workload, applied, steps=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[n]) for n, t in workload.model.state_dict().items())
    assert not any("forward" in m.__dict__ for m in workload.model.modules())
    assert not workload.optimizer.state


def _numbers(loss: float = 1.0, grad: float = 2.0, buffer: int = 3) -> Numbers:
    return Numbers(
        torch.tensor(loss), {"w": torch.tensor([grad, 4.0])}, {"n": torch.tensor(buffer)}
    )


def test_compare() -> None:
    assert compare(_numbers(), _numbers()).bitwise_vs_unplanned
    loss = compare(_numbers(), _numbers(loss=1.5))
    assert (loss.bitwise_vs_unplanned, loss.loss_max_abs_diff) == (False, 0.5)
    grad = compare(_numbers(), _numbers(grad=2.4))
    assert not grad.bitwise_vs_unplanned
    assert grad.grad_max_rel_diff == pytest.approx(0.1)
    assert not compare(_numbers(), _numbers(buffer=4)).bitwise_vs_unplanned
    nan = float("nan")
    assert compare(_numbers(grad=nan), _numbers(grad=nan)).bitwise_vs_unplanned
    assert not compare(_numbers(), _numbers(grad=nan)).bitwise_vs_unplanned
    missing = Numbers(torch.tensor(1.0), {}, {"n": torch.tensor(3)})
    assert not compare(_numbers(), missing).bitwise_vs_unplanned
    reshaped = Numbers(torch.tensor(1.0), {"w": torch.zeros(3)}, {"n": torch.tensor(3)})
    assert compare(_numbers(), reshaped).grad_max_rel_diff == float("inf")


def test_a_gradient_that_is_rounding_alone_is_not_far_from_eager() -> None:
    """A bias of an attention's keys has no gradient: its rounding was called 1.6 from eager."""
    real = torch.tensor([1.0, 0.5])

    def numbers(noise: float, factor: float = 1.0) -> Numbers:
        gradients = {"key.bias": torch.tensor([noise]), "weight": factor * real}
        return Numbers(torch.tensor(1.0), gradients, {})

    def apart(other: Numbers, small: float = SMALL) -> float:
        return compare(numbers(1e-9), other, small=small).grad_max_rel_diff

    assert apart(numbers(-1e-9), small=0.0) == pytest.approx(2.0)
    assert 0 < apart(numbers(-1e-9)) < 1e-5
    assert apart(numbers(1e-9, 1.1)) == pytest.approx(0.1, rel=1e-3)
    assert apart(numbers(0.5)) > 1


@pytest.mark.parametrize(
    ("planned", "note", "agree", "judged"),
    [
        (2.0, None, True, True),
        (2.02, "full precision is no measure here: unplanned gradients are 1.4 of", True, True),
        (-2.0, "together are 2 of their length from the unplanned ones", True, False),
        (9.0, None, False, False),
    ],
)
def test_a_reference_as_far_as_zeros_is_no_measure(
    zoo: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    planned: float,
    note: str | None,
    agree: bool,
    judged: bool,
) -> None:
    """ResNet-152: both steps were 1.39 of the gradients' length from full precision."""

    def gradients(first: float, second: float) -> Numbers:
        return Numbers(torch.tensor(1.0), {"w": torch.tensor([first, second])}, {})

    reference = gradients(2.0, 0.0) if note is None and agree else gradients(0.0, 2.0)
    monkeypatch.setattr(numerics, "unplanned_numbers", lambda *given: (reference, False))
    result = Numerics(False, 0.0, abs(planned - 2) / 2, agree=False)
    found = numerics._against_reference(
        zoo.workload(zoo.Stack, zoo.sequences),
        result,
        gradients(2.0, 0.0),
        gradients(planned, 0.0),
    )
    assert found.agree is agree
    assert (found.error_vs_reference is None or found.reference_judges) is judged
    assert (note or "") in (found.note or "") and (note is None) == (found.note is None)


def test_imaginary_parts_are_compared() -> None:
    """They were dropped, with a warning of torch."""

    def numbers(gradient: complex) -> Numbers:
        return Numbers(torch.tensor(1.0), {"weight": torch.tensor([gradient])}, {})

    one, other = numbers(1 + 1j), numbers(1 - 1j)
    assert compare(one, other).grad_max_rel_diff == pytest.approx(2**0.5)
    assert gradient_error(one, other) == pytest.approx(2**0.5)


def test_deterministic_is_put_back() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("before", [None, ":16:8", ":4096:2"])
def test_strict_ones_find_the_setting_they_ask_for(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv(CUBLAS, raising=False)
    if before is not None:
        monkeypatch.setenv(CUBLAS, before)
    with deterministic(strict=True):
        assert os.environ[CUBLAS] in (":4096:8", ":16:8")
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ.get(CUBLAS) == before
    with deterministic():
        assert os.environ.get(CUBLAS) == before


def test_the_budget_check_measures_the_planned_step(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack, lambda: zoo.sequences(64))
    profile = profile_workload(workload, rounds=1)
    plan = make_plan(profile, Goal(strategy="all"))
    planned = Applied(plan, workload.model)
    free = check_budget(workload, planned, None)
    assert free.holds and free.peak is not None
    assert free.peak.bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.02)
    assert profile.baseline is not None
    assert free.peak.bytes < 0.9 * profile.baseline.peak_bytes
    exact = check_budget(workload, planned, free.peak.bytes)
    assert exact.holds
    short = check_budget(workload, planned, free.peak.bytes - 1000)
    assert not short.holds
    assert short.over_bytes == pytest.approx(1000, abs=100)


def test_speed_compares_planned_with_plain(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack, lambda: zoo.sequences(64))
    planned = _applied(workload)
    speed = compare_speed(workload, planned, steps=9)
    assert speed.ratio is not None and 0.6 < speed.ratio < 5
    # Steps below a millisecond, maybe beside other processes.
    assert speed.same_code_ratio is not None and 0.2 < speed.same_code_ratio < 5
    alone = compare_speed(workload, planned, steps=1, baseline=False)
    assert (alone.ratio, alone.same_code_ratio, alone.plain) == (None, None, None)


def test_ratios() -> None:
    def timing(seconds: float) -> Timing:
        return Timing(seconds, 0.0, (seconds,))

    speed = Speed(timing(3.0), timing(2.0), timing(2.2))
    assert (speed.ratio, speed.same_code_ratio) == (1.5, pytest.approx(1.1))
