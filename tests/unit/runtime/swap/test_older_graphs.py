"""Graphs of older steps, and steps larger than planned: the same numbers, with less that moves."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memfit.errors import UsageError
from memfit.ir.swap import SwapStatistics
from memfit.runtime.swap import arena as arenas
from memfit.runtime.swap.lanes import Lanes
from memfit.workload import Workload

STACK = ["stem", *(f"blocks.{i}" for i in range(4)), "head"]
Loop = Callable[[Workload], list[torch.Tensor]]


def _break(_: torch.Tensor) -> None:
    raise ValueError("on purpose")


def _fragile(x: torch.Tensor) -> torch.Tensor:
    """The same, but a backward fails when it comes here."""
    x = x.clone()
    x.register_hook(_break)
    return x


def _step(workload: Workload, loss: torch.Tensor) -> torch.Tensor:
    workload.optimizer.zero_grad()
    loss.backward()
    workload.optimizer.step()
    return loss.detach()


def _skipping(workload: Workload) -> list[torch.Tensor]:
    """A step without a backward, as when its loss is not a number."""
    losses = []
    for number in range(4):
        loss = workload.compute_loss()
        if number != 1:
            losses.append(_step(workload, loss))
    return losses


def _failing_in_the_loss(workload: Workload) -> list[torch.Tensor]:
    """The name of the loss, and the exception, hold the graph that nobody walks."""
    losses, errors = [], []
    for number in range(4):
        loss = workload.compute_loss()
        if number == 1:
            loss = _fragile(loss)
        try:
            losses.append(_step(workload, loss))
        except ValueError as error:
            errors.append(error)
    assert len(errors) == 1
    return losses


def _output_of_a_failed_step(workload: Workload) -> list[torch.Tensor]:
    output = workload.model(workload.batch)
    losses = [_step(workload, workload.compute_loss())]
    del output
    return [*losses, _step(workload, workload.compute_loss())]


def _two_forwards(workload: Workload) -> list[torch.Tensor]:
    return [_step(workload, workload.compute_loss() + workload.compute_loss()) for _ in range(2)]


def _two_forwards_walked_back(workload: Workload) -> list[torch.Tensor]:
    one, other = workload.compute_loss(), workload.compute_loss()
    other.backward()
    return [_step(workload, one)]


def _larger(workload: Workload) -> list[torch.Tensor]:
    batch = torch.cat([workload.batch, workload.batch])
    return [_step(workload, workload.compute_loss(batch)) for _ in range(2)]


def _part_then_another(workload: Workload) -> list[torch.Tensor]:
    """A backward of a part, a whole step, the other part of the first."""
    loss = workload.compute_loss()
    parameters = list(workload.model.parameters())
    one = torch.autograd.grad(loss, parameters[-1:], retain_graph=True)
    workload.compute_loss().backward()
    return [*one, *torch.autograd.grad(loss, parameters[:1])]


LOOPS: dict[str, Loop] = {
    "a step is skipped": _skipping,
    "a backward fails in the loss": _failing_in_the_loss,
    "an output is kept": _output_of_a_failed_step,
    "two forwards": _two_forwards,
    "two forwards, the second walked first": _two_forwards_walked_back,
    "a larger batch": _larger,
    "a part, another step, the rest": _part_then_another,
}


def _numbers(workload: Workload, loop: Loop) -> list[Any]:
    torch.manual_seed(3)
    found: list[Any] = loop(workload)
    parameters = list(workload.model.parameters())
    return [*found, *(p.grad for p in parameters), *(p.detach().clone() for p in parameters)]


@pytest.fixture
def one_step(zoo: SimpleNamespace, swapping: SimpleNamespace) -> Any:
    """A model that swaps, with host memory for exactly one step."""

    @contextmanager
    def at_work(workload: Workload, lanes: Lanes | None = None, **options: Any) -> Iterator[Any]:
        with swapping.swapped(workload.model, STACK) as measured:
            workload.compute_loss()
            room = measured.arena.highest_bytes
        with swapping.swapped(workload.model, STACK, lanes, arena_bytes=room, **options) as made:
            yield made

    return at_work


@pytest.mark.parametrize("loop", LOOPS)
def test_a_full_arena_ended_the_step_instead_of_leaving_tensors_where_they_are(
    zoo: SimpleNamespace,
    lanes: Lanes,
    one_step: Any,
    assert_same: Any,
    caplog: pytest.LogCaptureFixture,
    loop: str,
) -> None:
    expected = _numbers(zoo.workload(zoo.Stack), LOOPS[loop])
    workload = zoo.workload(zoo.Stack)
    with one_step(workload, lanes) as at_work, caplog.at_level(logging.WARNING, "memfit"):
        assert_same(_numbers(workload, LOOPS[loop]), expected)
        done: SwapStatistics = at_work.engine.statistics()
        gc.collect()
        assert at_work.arena.used_bytes == 0
    assert done.moves > 0 and done.stayed > 0
    (warning,) = caplog.messages
    assert "host memory for swapping is full" in warning
    why = "larger batch" if loop == "a larger batch" else "older step is still alive"
    assert why in warning


def test_what_finds_no_room_stays_and_counts_once(
    zoo: SimpleNamespace, swapping: SimpleNamespace, assert_same: Any
) -> None:
    expected = _numbers(zoo.workload(zoo.Stack), _skipping)
    workload = zoo.workload(zoo.Stack)
    with swapping.swapped(workload.model, STACK) as at_work:
        workload.compute_loss().backward()
        moves = at_work.engine.statistics().moves
    workload = zoo.workload(zoo.Stack)
    with swapping.swapped(workload.model, STACK, arena_bytes=4096) as at_work:
        assert_same(_numbers(workload, _skipping), expected)
        done = at_work.engine.statistics()
    assert done.moves + done.stayed == 4 * moves


def test_garbage_was_looked_for_with_every_tensor_that_found_no_room(
    zoo: SimpleNamespace,
    swapping: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = []
    monkeypatch.setattr(arenas, "gc", SimpleNamespace(collect=lambda: looked.append(1)))
    workload = zoo.workload(zoo.Stack)
    with swapping.swapped(workload.model, STACK, arena_bytes=4096) as at_work:
        for _ in range(20):
            workload.compute_loss().backward()
        assert at_work.engine.statistics().stayed > 20
    assert 1 <= len(looked) <= 5


def test_a_backward_after_swapping_was_switched_off(
    zoo: SimpleNamespace, swapping: SimpleNamespace, lanes: Lanes, assert_same: Any
) -> None:
    """What lies on the host is the graph's, and goes with it."""

    def gradients(workload: Workload, loss: torch.Tensor) -> list[Any]:
        loss.backward()
        return [p.grad for p in workload.model.parameters()]

    plain = zoo.workload(zoo.Stack)
    torch.manual_seed(3)
    expected = gradients(plain, plain.compute_loss())
    workload = zoo.workload(zoo.Stack)
    with swapping.swapped(workload.model, STACK, lanes) as at_work:
        torch.manual_seed(3)
        loss = workload.compute_loss()
        at_work.engine.close()
        at_work.engine.close()
        assert at_work.arena.used_bytes > 0
        assert_same(gradients(workload, loss), expected)
        assert at_work.arena.used_bytes == 0


def test_a_step_that_is_owned_leaves_nothing_behind_and_no_other_loses_anything(
    zoo: SimpleNamespace, swapping: SimpleNamespace, lanes: Lanes
) -> None:
    workload = zoo.workload(zoo.Stack)
    with swapping.swapped(workload.model, STACK, lanes) as at_work:
        other = workload.compute_loss()
        used = at_work.arena.used_bytes
        with pytest.raises(ValueError, match="on purpose") as error, at_work.engine.owned():
            loss = workload.compute_loss()
            _fragile(loss).backward()
        assert at_work.arena.used_bytes == used, "although its graph is alive"
        with pytest.raises(ValueError, match="before"), at_work.engine.owned():
            raise ValueError("before a forward")
        other.backward()
        assert at_work.arena.used_bytes == 0
        with pytest.raises(UsageError, match="given up"):
            loss.backward()
        del error


def test_what_an_unfinished_forward_saved_is_kept_with_its_graph(
    zoo: SimpleNamespace, swapping: SimpleNamespace, lanes: Lanes, assert_same: Any
) -> None:
    """A forward whose end did not come, though it did not fail."""

    def gradients(workload: Workload, router: Any = None) -> list[Any]:
        torch.manual_seed(3)
        output = workload.model(workload.batch)
        if router is not None:
            router.begin()
        (output.square().mean() + workload.compute_loss()).backward()
        return [p.grad for p in workload.model.parameters()]

    expected = gradients(zoo.workload(zoo.Stack))
    workload = zoo.workload(zoo.Stack)
    with swapping.swapped(workload.model, STACK, lanes, model_calls=2) as at_work:
        assert_same(gradients(workload, at_work.router), expected)
        assert at_work.engine.statistics().moves > 0


def test_a_checkpoint_around_the_whole_loss_met_other_tensors_in_its_replay(
    zoo: SimpleNamespace,
    swapping: SimpleNamespace,
    lanes: Lanes,
    assert_same: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loop(workload: Workload) -> list[torch.Tensor]:
        return [
            _step(workload, checkpoint(workload.compute_loss, use_reentrant=False))
            for _ in range(2)
        ]

    expected = _numbers(zoo.workload(zoo.Stack), loop)
    workload = zoo.workload(zoo.Stack)
    with (
        swapping.swapped(workload.model, STACK, lanes) as at_work,
        caplog.at_level(logging.WARNING, "memfit"),
    ):
        assert_same(_numbers(workload, loop), expected)
        done = at_work.engine.statistics()
        assert done.moves == 0 and done.steps == 2
        workload.compute_loss().backward()
        assert at_work.engine.statistics().moves > 0, "moved again without it"
    (warning,) = caplog.messages
    assert "torch.utils.checkpoint" in warning
