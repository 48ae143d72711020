"""Stepping in backward gives the numbers of the plain loop, bit for bit, over 20 steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from memfit.errors import UsageError
from memfit.measure.step import is_out_of_memory
from memfit.runtime.optimizer.footprint import Footprint
from memfit.runtime.optimizer.in_backward.step_in_backward import HalfStepError, StepInBackward


def test_each_optimizer(training: Any, any_optimizer: str) -> None:
    losses, end = training.expect(any_optimizer)
    model, optimizer = training.build(any_optimizer)
    with StepInBackward(optimizer, training.groups_of(model)) as stepper:
        training.same(training.train_in_backward(stepper, model), losses)
    training.same(training.snapshot(model, optimizer), end)


@pytest.mark.parametrize("clip", ["keep", "two_pass"])
def test_each_way_to_train(
    training: Any, some_optimizer: str, some_scenario: str, clip: Any
) -> None:
    losses, end = training.expect(some_optimizer, some_scenario, decay_groups=True)
    model, optimizer = training.build(some_optimizer, decay_groups=True)
    options = training.scenario(some_scenario, optimizer)
    with StepInBackward(
        optimizer, training.groups_of(model), clip=clip, clipped=model.parameters()
    ) as stepper:
        training.same(training.train_in_backward(stepper, model, **options), losses)
    training.same(training.snapshot(model, optimizer), end)


def test_some_steps_of_the_scaler_overflow(training: Any) -> None:
    model, optimizer = training.build("sgd")
    scaler = training.scenario("scaler", optimizer)["scaler"]
    with StepInBackward(optimizer, clip="two_pass") as stepper:
        scales = []
        for number in range(20):
            before = copy.deepcopy(model.state_dict())
            stepper.backward(training.loss_of(model, number), scaler=scaler)
            scale = scaler.get_scale()
            scaler.update()
            scales.append(scaler.get_scale() / scale)
            if scales[-1] < 1:
                training.same(dict(model.state_dict()), dict(before))
    assert min(scales) < 1 <= max(scales)


def test_two_passes_with_the_loss_computed_anew(training: Any) -> None:
    losses, end = training.expect("adamw", "clip")
    model, optimizer = training.build("adamw")
    with StepInBackward(optimizer, clip="two_pass") as stepper:
        trained = training.train_in_backward(stepper, model, clip_norm=8.0, anew=True)
    training.same(trained, losses)
    training.same(training.snapshot(model, optimizer), end)


def test_two_passes_hold_one_group_of_gradients_at_a_time(training: Any) -> None:
    model, optimizer = training.build()
    groups = [*training.groups_of(model), [*model.norm.parameters(), model.embedding.weight]]
    alive = []

    def look(_: torch.Tensor) -> None:
        alive.append({i for i, g in enumerate(groups) for p in g if p.grad is not None})

    with StepInBackward(optimizer, groups, clip="two_pass") as stepper:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(look)
        stepper.backward(training.loss_of(model, 0), clip_norm=8.0)
    assert len(alive) == 2 * len(list(model.parameters()))
    assert all(present <= {i, 3} for present in alive for i in [min(present, default=3)])


def test_gradients_of_earlier_micro_batches_are_kept(training: Any) -> None:
    model, optimizer = training.build()
    with StepInBackward(optimizer) as stepper:
        before = copy.deepcopy(model.state_dict())
        stepper.backward(training.loss_of(model, 0), last=False)
        assert all(p.grad is not None for p in model.parameters())
        training.same(dict(model.state_dict()), dict(before))


def test_gradients_of_the_users_own_loop_are_left_alone(
    training: Any, some_optimizer: str, some_scenario: str
) -> None:
    """They were used as they appeared: before they were clipped, scaled as they were."""
    losses, end = training.expect(some_optimizer, some_scenario)
    model, optimizer = training.build(some_optimizer)
    options = training.scenario(some_scenario, optimizer)
    with StepInBackward(optimizer, training.groups_of(model)):
        training.same(training.train_plainly(model, optimizer, **options), losses)
    training.same(training.snapshot(model, optimizer), end)


def test_schedulers_see_one_step_per_step(training: Any) -> None:
    model, optimizer = training.build()
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with StepInBackward(optimizer) as stepper:
        training.train_in_backward(stepper, model, range(3), scheduler=scheduler)
    assert len(seen) == 3


@pytest.mark.parametrize("in_backward_first", [True, False])
def test_resume(training: Any, some_optimizer: str, in_backward_first: bool) -> None:
    losses, end = training.expect(some_optimizer)
    trained, state = [], None
    for half in (range(10), range(10, 20)):
        model, optimizer = training.build(some_optimizer)
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        if in_backward_first is (half.start == 0):
            with StepInBackward(optimizer, training.groups_of(model)) as stepper:
                trained += training.train_in_backward(stepper, model, half)
        else:
            trained += training.train_plainly(model, optimizer, half)
        state = copy.deepcopy(training.snapshot(model, optimizer))
    training.same(trained, losses)
    training.same(state, end)


def test_loading_while_at_work(training: Any) -> None:
    losses, end = training.expect("adamw")
    model, optimizer = training.build("adamw")
    training.train_plainly(model, optimizer, range(10))
    state = training.snapshot(model, optimizer)
    model, optimizer = training.build("adamw")
    with StepInBackward(optimizer) as stepper:
        training.train_in_backward(stepper, model, range(3))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        training.same(training.train_in_backward(stepper, model, range(10, 20)), losses[10:])
    training.same(training.snapshot(model, optimizer), end)


def test_undo_leaves_nothing_behind(training: Any) -> None:
    losses, end = training.expect("adamw")
    model, optimizer = training.build("adamw")
    stepper = StepInBackward(optimizer).install()
    trained = training.train_in_backward(stepper, model, range(10))
    stepper.undo()
    stepper.undo()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_post_hooks
    training.same(trained + training.train_plainly(model, optimizer, range(10, 20)), losses)
    training.same(training.snapshot(model, optimizer), end)


def test_footprint(training: Any) -> None:
    model, optimizer = training.build()
    groups = training.groups_of(model)
    block = 4 * (8 * 16 + 16 + 16 * 8 + 8)
    found = StepInBackward(optimizer, groups).footprint()
    assert found == Footprint(2 * block + 4 * (64 + 8), block, 0)
    assert found.saved_bytes == block + 4 * (64 + 8)


class Fails(torch.autograd.Function):
    """Passes a tensor through; its backward fails."""

    error: BaseException = ValueError("no gradient today")

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise Fails.error


def failing(position: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    x = torch.ones(2, 4)
    for i, layer in enumerate(model):
        x = layer(x)
        if i == position:
            x = Fails.apply(x)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), x.sum()


def test_an_error_in_backward_says_how_far_the_step_came() -> None:
    model, optimizer, loss = failing(0)
    with StepInBackward(optimizer, [list(layer.parameters()) for layer in model]) as stepper:
        with pytest.raises(HalfStepError, match=r"2 of 3 groups.*no gradient today") as caught:
            stepper.backward(loss)
        assert isinstance(caught.value.__cause__, ValueError)
        assert "checkpoint" in str(caught.value)
        stepper.backward(model(torch.ones(2, 4)).sum())  # it can go on


def test_out_of_memory_half_way_is_known_as_such_and_not_taken_for_a_batch_to_leave_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Fails, "error", torch.OutOfMemoryError("no room"))
    for position, half_way in ((0, True), (2, False)):
        model, optimizer, loss = failing(position)
        groups = [list(layer.parameters()) for layer in model]
        with StepInBackward(optimizer, groups) as stepper, pytest.raises(Exception) as caught:
            stepper.backward(loss)
        assert is_out_of_memory(caught.value)
        # Loops catch torch's error and go on with the next batch, on weights as they were.
        assert isinstance(caught.value, torch.OutOfMemoryError) != half_way
    assert not is_out_of_memory(HalfStepError("of something else"))


def test_an_error_before_any_step_stays_what_it_is() -> None:
    model, optimizer, loss = failing(2)
    before = [p.detach().clone() for p in model.parameters()]
    with StepInBackward(optimizer) as stepper, pytest.raises(ValueError, match="no gradient"):
        stepper.backward(loss)
    torch.testing.assert_close([p.detach() for p in model.parameters()], before, rtol=0, atol=0)


def test_an_error_in_the_first_of_two_passes_steps_nothing() -> None:
    model, optimizer, loss = failing(0)
    before = [p.detach().clone() for p in model.parameters()]
    with StepInBackward(optimizer, clip="two_pass") as stepper, pytest.raises(ValueError):
        stepper.backward(loss, clip_norm=1.0)
    torch.testing.assert_close([p.detach() for p in model.parameters()], before, rtol=0, atol=0)


def test_ctrl_c_stays_ctrl_c_and_says_how_far_the_step_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, optimizer, loss = failing(0)
    monkeypatch.setattr(Fails, "error", KeyboardInterrupt())
    with StepInBackward(optimizer) as stepper, pytest.raises(KeyboardInterrupt) as caught:
        stepper.backward(loss)
    assert "4 of 6 groups" in caught.value.__notes__[0]


def test_a_gradient_that_comes_in_parts_is_refused() -> None:
    bias, weight = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))

    class Twice(torch.autograd.Function):
        """Passes a tensor through; its backward has a backward of its own."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                bias.sum().backward()
            return gradient

    optimizer = torch.optim.SGD([bias, weight], lr=0.1)
    with (
        StepInBackward(optimizer) as stepper,
        pytest.raises(HalfStepError, match="after its group had used it"),
    ):
        stepper.backward((Twice.apply(weight) + bias).sum())


@pytest.mark.parametrize("scaled", [True, False])
def test_what_waits_is_stepped_group_by_group(
    training: Any, monkeypatch: pytest.MonkeyPatch, scaled: bool
) -> None:
    """So that what a step takes for itself is that of one group, as it was planned for."""
    model, optimizer = training.build()
    groups = [*training.groups_of(model), [*model.norm.parameters(), model.embedding.weight]]
    stepped: list[set[int]] = []
    with StepInBackward(optimizer, groups, clip="two_pass") as stepper:
        step_group = stepper._step_group

        def watched(group: Any) -> None:
            there = {i for i, g in enumerate(groups) for p in g if p.grad is not None}
            stepped.append(there)
            step_group(group)

        monkeypatch.setattr(stepper, "_step_group", watched)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
        for number in (0, 3):
            loss = training.loss_of(model, number)
            stepper.backward(loss, last=number == 3, clip_norm=8.0, scaler=scaler)
    assert stepped == [{0, 1, 2, 3}, {1, 2, 3}, {2, 3}, {3}]
    assert not optimizer._optimizer_step_pre_hooks


def test_sparse_gradients_are_refused() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    with StepInBackward(optimizer) as stepper, pytest.raises(UsageError, match="sparse"):
        stepper.backward(embedding(torch.tensor([1])).sum())


def test_optimizers_that_cannot_step_in_parts_are_refused(training: Any) -> None:
    class Own(torch.optim.SGD):
        separable: bool

        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model, _ = training.build()
    with pytest.raises(UsageError, match="LBFGS evaluates the loss several times"):
        StepInBackward(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UsageError, match="does not know whether Own") as refused:
        StepInBackward(Own(model.parameters()))
    assert "Own.separable = True" in str(refused.value.hint)
    with pytest.raises(UsageError, match="SparseAdam"):
        StepInBackward(torch.optim.SparseAdam(model.parameters()))
    Own.separable = True
    StepInBackward(Own(model.parameters()))


def test_wrong_words_are_refused(training: Any) -> None:
    model, optimizer = training.build()
    weight = model.norm.weight
    with pytest.raises(UsageError, match="clip is 'never'"):
        StepInBackward(optimizer, clip="never")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="twice"):
        StepInBackward(optimizer, [[weight], [weight]])
    with pytest.raises(UsageError, match="not optimized"):
        StepInBackward(optimizer, [[torch.nn.Parameter(torch.ones(3))]])
    with pytest.raises(UsageError, match="not installed"):
        StepInBackward(optimizer).backward(training.loss_of(model, 0))
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UsageError, match="pre-hooks"):
        StepInBackward(optimizer).install()
