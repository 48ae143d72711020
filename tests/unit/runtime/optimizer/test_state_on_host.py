"""State that lives on the host gives the numbers of the plain loop, bit for bit."""

from __future__ import annotations

import copy
import io
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from memfit.errors import HostMemoryError, UsageError
from memfit.runtime.optimizer.in_backward.step_in_backward import StepInBackward
from memfit.runtime.optimizer.on_host.state_on_host import StateOnHost, chunks


def test_each_optimizer(training: Any, any_optimizer: str) -> None:
    losses, end = training.expect(any_optimizer)
    model, optimizer = training.build(any_optimizer)
    with StateOnHost(optimizer, training.groups_of(model)):
        training.same(training.train_plainly(model, optimizer), losses)
        training.same(training.snapshot(model, optimizer), end)
    training.same(training.snapshot(model, optimizer), end)


def test_each_way_to_train(training: Any, some_optimizer: str, some_scenario: str) -> None:
    losses, end = training.expect(some_optimizer, some_scenario)
    model, optimizer = training.build(some_optimizer)
    options = training.scenario(some_scenario, optimizer)
    with StateOnHost(optimizer):
        training.same(training.train_plainly(model, optimizer, **options), losses)
    training.same(training.snapshot(model, optimizer), end)


def test_each_way_to_train_in_backward(
    training: Any, some_optimizer: str, some_scenario: str
) -> None:
    losses, end = training.expect(some_optimizer, some_scenario)
    model, optimizer = training.build(some_optimizer)
    options = training.scenario(some_scenario, optimizer)
    groups = training.groups_of(model)
    with (
        StateOnHost(optimizer, groups) as state,
        StepInBackward(
            optimizer, groups, stepper=state, clip="two_pass", clipped=model.parameters()
        ) as stepper,
    ):
        training.same(training.train_in_backward(stepper, model, **options), losses)
    training.same(training.snapshot(model, optimizer), end)


def test_the_first_backward_fetches_ahead(training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = training.build("adamw")
    training.train_plainly(model, optimizer, range(2))  # so that there is state to fetch
    groups = training.groups_of(model)
    ahead: list[bool] = []
    step = StateOnHost._step_block

    def stepped(self: StateOnHost, block: Any, parameters: Any) -> None:
        ahead.append(block._storage is not None)
        step(self, block, parameters)

    monkeypatch.setattr(StateOnHost, "_step_block", stepped)
    with (
        StateOnHost(optimizer, groups) as state,
        StepInBackward(optimizer, groups, stepper=state) as stepper,
    ):
        training.train_in_backward(stepper, model, range(2, 3))
    # The last block, the first one, and after backward the rest; the branch is not used this time.
    assert ahead == [False, True, False]


@pytest.mark.parametrize("in_backward", [False, True])
def test_some_of_the_state_stays(training: Any, some_optimizer: str, in_backward: bool) -> None:
    losses, end = training.expect(some_optimizer)
    model, optimizer = training.build(some_optimizer)
    groups = training.groups_of(model)
    everything = StateOnHost(optimizer, groups).footprint().removed_bytes
    with ExitStack() as stack:
        state = stack.enter_context(StateOnHost(optimizer, groups, kept_bytes=everything // 2))
        left = state.footprint().removed_bytes
        assert everything - everything // 2 <= left <= everything
        assert (left < everything) == (everything > 0 and _smallest(state) <= everything // 2)
        if in_backward:
            stepper = stack.enter_context(StepInBackward(optimizer, groups, stepper=state))
            training.same(training.train_in_backward(stepper, model), losses)
        else:
            training.same(training.train_plainly(model, optimizer), losses)
        assert sum(block.size_bytes for block in state._all()) == left
        training.same(training.snapshot(model, optimizer), end)
    training.same(training.snapshot(model, optimizer), end)


def _smallest(state: StateOnHost) -> int:
    return min(state._sizes.of(group) for group in state.groups)


@pytest.mark.parametrize("on_host_first", [True, False])
def test_resume(training: Any, some_optimizer: str, on_host_first: bool) -> None:
    losses, end = training.expect(some_optimizer)
    trained, saved = [], None
    for half in (range(10), range(10, 20)):
        model, optimizer = training.build(some_optimizer)
        on_host = on_host_first is (half.start == 0)
        state = StateOnHost(optimizer, training.groups_of(model))
        if on_host:
            state.install()
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        trained += training.train_plainly(model, optimizer, half)
        saved = copy.deepcopy(training.snapshot(model, optimizer))
        state.undo()
        training.same(training.snapshot(model, optimizer), saved)
    training.same(trained, losses)
    training.same(saved, end)


def test_loading_over_state_that_is_there(training: Any) -> None:
    losses, end = training.expect("adamw")
    model, optimizer = training.build("adamw")
    training.train_plainly(model, optimizer, range(10))
    saved = training.snapshot(model, optimizer)
    with StateOnHost(optimizer, training.groups_of(model)):
        training.train_plainly(model, optimizer, range(15, 20))
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        training.same(training.train_plainly(model, optimizer, range(10, 20)), losses[10:])
    training.same(training.snapshot(model, optimizer), end)


def test_a_refused_state_dict_changes_nothing(training: Any) -> None:
    _, end = training.expect("adamw")
    model, optimizer = training.build("adamw")
    with StateOnHost(optimizer):
        training.train_plainly(model, optimizer)
        with pytest.raises(ValueError, match="parameter groups"):
            optimizer.load_state_dict({"state": {}, "param_groups": []})
        training.same(training.snapshot(model, optimizer), end)


def test_saved_tensors_hold_no_more_than_themselves(training: Any) -> None:
    model, optimizer = training.build("adamw")
    with StateOnHost(optimizer):
        training.train_plainly(model, optimizer, range(1))
        one = optimizer.state[model.norm.weight]["exp_avg"]
        file = io.BytesIO()
        torch.save(one, file)
        assert one.untyped_storage().nbytes() == 32 and len(file.getvalue()) < 2000
        expected = one.clone()
    training.same(one, expected)  # what was taken before stays readable after undo


def test_state_of_other_layouts() -> None:
    weights = [
        torch.nn.Parameter(torch.randn(4, 6, 5, 3).to(memory_format=torch.channels_last)),
        torch.nn.Parameter(torch.randn(5, 7).t()),
        torch.nn.Parameter(torch.randn(9).to(torch.bfloat16)),
    ]
    twins = [torch.nn.Parameter(w.detach().clone()) for w in weights]
    optimizers = [torch.optim.AdamW(ws, lr=0.1) for ws in (weights, twins)]
    with StateOnHost(optimizers[0], [[w] for w in weights]):
        for _ in range(3):
            for ws, optimizer in zip((weights, twins), optimizers, strict=True):
                sum((w.float() ** 2).sum() for w in ws).backward()
                optimizer.step()
                optimizer.zero_grad()
        strides = [optimizers[0].state[w]["exp_avg"].stride() for w in weights]
    assert strides == [w.stride() for w in weights]
    torch.testing.assert_close(weights, twins, rtol=0, atol=0)


def test_two_groups_at_most_are_on_the_device(
    training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = training.build("adamw")
    state = StateOnHost(optimizer, [[p] for p in model.parameters()])
    with state:
        training.train_plainly(model, optimizer, range(4))
        steps = []
        one_step = state._parts.step

        def count(parameters: Any) -> None:
            steps.append(sum(block._storage is not None for block in state._all()))
            one_step(parameters)

        monkeypatch.setattr(state._parts, "step", count)
        training.train_plainly(model, optimizer, range(6, 7))
        assert steps == [2] * (len(steps) - 1) + [1]
        assert all(block._storage is None for block in state._all())


def test_footprint_before_and_after_the_first_step(training: Any, some_optimizer: str) -> None:
    model, optimizer = training.build(some_optimizer)
    with StateOnHost(optimizer, training.groups_of(model)) as state:
        before = state.footprint()
        training.train_plainly(model, optimizer, range(1))
        assert state.footprint() == before
        assert state._arena is not None and state._arena.capacity_bytes == before.host_bytes
        assert state._arena.used_bytes == before.removed_bytes > before.working_bytes > 0


def test_state_of_unknown_size_grows_with_the_first_step(training: Any) -> None:
    losses, _ = training.expect("adafactor")
    model, optimizer = training.build("adafactor")
    state = StateOnHost(optimizer)
    with state:
        training.same(training.train_plainly(model, optimizer), losses)
        assert state.footprint().host_bytes > 0


def test_groups_in_backward_need_not_be_those_of_the_state(training: Any) -> None:
    losses, end = training.expect("adamw")
    for of_state, of_steps in ((None, None), (1, None), (None, 1)):
        model, optimizer = training.build("adamw")
        single = [[p] for p in model.parameters()]
        whole = [list(model.parameters())]
        with (
            StateOnHost(optimizer, single if of_state else whole) as state,
            StepInBackward(optimizer, single if of_steps else whole, stepper=state) as stepper,
        ):
            training.same(training.train_in_backward(stepper, model), losses)
        training.same(training.snapshot(model, optimizer), end)


def test_parameters_that_come_later_are_refused(training: Any) -> None:
    model, optimizer = training.build()
    with StateOnHost(optimizer):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        training.loss_of(model, 0).backward()
        with pytest.raises(UsageError, match="after its state had been moved"):
            optimizer.step()


def test_no_room_on_the_host_leaves_the_optimizer_as_it_was(
    training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = training.build()
    training.train_plainly(model, optimizer, range(2))
    before = training.snapshot(model, optimizer)
    with monkeypatch.context() as patched:
        patched.setattr("memfit.runtime.swap.arena.free_host_bytes", lambda: 10)
        with pytest.raises(HostMemoryError):
            StateOnHost(optimizer).install()
    training.same(training.snapshot(model, optimizer), before)
    training.train_plainly(model, optimizer, range(2, 4))


def test_groups_are_cut_by_size(training: Any) -> None:
    model, optimizer = training.build()
    groups = chunks(optimizer, 600)
    assert [p for group in groups for p in group] == list(model.parameters())
    assert 1 < len(groups) < len(list(model.parameters()))
    assert all(len(g) == 1 or 4 * sum(p.numel() for p in g) <= 600 for g in groups)


def test_a_closure_is_refused(training: Any) -> None:
    _, optimizer = training.build()
    with StateOnHost(optimizer), pytest.raises(UsageError, match="closure"):
        optimizer.step(lambda: torch.tensor(0.0))


def test_an_error_in_the_step_leaves_the_optimizer_whole(
    training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = training.build()
    state = StateOnHost(optimizer)
    with state:
        training.train_plainly(model, optimizer, range(2))
        before = training.snapshot(model, optimizer)

        def fail(_: Any) -> None:
            raise RuntimeError("no step today")

        training.loss_of(model, 0).backward()
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no step"):
            patched.setattr(state._parts, "step", fail)
            optimizer.step()
        training.same(training.snapshot(model, optimizer), before)
        optimizer.zero_grad()
        training.train_plainly(model, optimizer, range(2, 4))


def test_sparse_gradients_are_refused() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    with StateOnHost(optimizer), pytest.raises(UsageError, match="sparse"):
        embedding(torch.tensor([1])).sum().backward()
        optimizer.step()
