"""Recomputed steps give the plain step's numbers, bit for bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memfit.capture.find import find_segments
from memfit.measure.step import untouched
from memfit.workload import Workload

TrainsAlike = Callable[..., None]
SEEDS = range(4)


def _autocast(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(batch).float().square().mean()


def _twice(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - model(batch.flip(0))).square().mean()


def _direct(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Calls the model's parts, never the model."""
    x = model.stem(batch)
    for block in model.blocks:
        x = block(x)
    return model.head(x).square().mean()


def _replacing(zoo: SimpleNamespace) -> nn.Module:
    """A model whose blocks put a new tensor where a buffer was, and use it."""

    class Layer(zoo.Block):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(zoo.WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean((0, 1))
            return super().forward(x) + self.average

    model = zoo.Stack(blocks=1)
    model.blocks = nn.ModuleList(Layer() for _ in range(3))
    return model


CASES: dict[str, Callable[[SimpleNamespace], Workload]] = {
    "dropout": lambda z: z.workload(z.Stack),
    "tied weights": lambda z: z.workload(z.TiedStack),
    "modules called twice": lambda z: z.workload(lambda: z.Reused(blocks=2)),
    "attention": lambda z: z.workload(z.AttentionNet),
    "tuples, dicts and keywords": lambda z: z.workload(z.ArgumentsNet),
    "skip connections": lambda z: z.workload(z.SkipNet),
    "changed buffers": lambda z: z.workload(z.CountingNet),
    "buffers put in place of others": lambda z: z.workload(lambda: _replacing(z)),
    "batch norm": lambda z: z.workload(z.ConvNet, z.images),
    "batch norm by cumulative average": lambda z: z.workload(
        lambda: z.ConvNet(lambda n: nn.BatchNorm2d(n, momentum=None)), z.images
    ),
    "instance norm with statistics": lambda z: z.workload(
        lambda: z.ConvNet(lambda n: nn.InstanceNorm2d(n, affine=True, track_running_stats=True)),
        z.images,
    ),
    "batch norm without statistics": lambda z: z.workload(
        lambda: z.ConvNet(lambda n: nn.BatchNorm2d(n, track_running_stats=False)), z.images
    ),
    "in-place relu": lambda z: z.workload(lambda: z.ConvNet(inplace=True), z.images),
    "in-place first": lambda z: z.workload(z.PreActivationNet, z.images),
    "autocast": lambda z: z.workload(z.Stack, loss=_autocast),
    "autocast, modules called twice": lambda z: z.workload(
        lambda: z.Reused(blocks=2), loss=_autocast
    ),
    "the model called twice": lambda z: z.workload(z.Siamese, loss=_twice),
    "the model never called": lambda z: z.workload(z.Stack, loss=_direct),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", SEEDS)
def test_loss_gradients_and_buffers_are_bitwise_the_same(
    zoo: SimpleNamespace, assert_trains_alike: TrainsAlike, case: str, seed: int
) -> None:
    assert_trains_alike(lambda: CASES[case](zoo), seed)


def test_frozen_parameters_and_a_frozen_first_block(
    zoo: SimpleNamespace, assert_trains_alike: TrainsAlike
) -> None:
    def build() -> Workload:
        workload = zoo.workload(zoo.Stack)
        workload.model.stem.requires_grad_(False)
        workload.model.blocks[0].requires_grad_(False)
        workload.model.blocks[2].up.weight.requires_grad_(False)
        return workload

    for seed in SEEDS:
        assert_trains_alike(build, seed)


def test_batch_norm_in_eval_mode_inside_a_training_model(
    zoo: SimpleNamespace, assert_trains_alike: TrainsAlike
) -> None:
    def build() -> Workload:
        workload = zoo.workload(zoo.ConvNet, zoo.images)
        workload.model.layer1[0].norm1.eval()
        return workload

    for seed in SEEDS:
        assert_trains_alike(build, seed)


def test_outputs_of_the_transformers_kind(
    zoo: SimpleNamespace, assert_trains_alike: TrainsAlike
) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Layer(zoo.Block):  # type: ignore[name-defined]
        def forward(self, before: Any, scale: float = 1.0) -> Any:
            hidden = super().forward(before.last_hidden_state * scale)
            return outputs.BaseModelOutput(last_hidden_state=hidden, attentions=(hidden.mean(),))

    class Net(zoo.Stack):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__(blocks=1)
            self.blocks = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = outputs.BaseModelOutput(last_hidden_state=self.stem(x))
            for block in self.blocks:
                output = block(output, scale=0.5)
            return self.head(output.last_hidden_state) + output.attentions[0]

    for seed in SEEDS:
        assert_trains_alike(lambda: zoo.workload(Net), seed)


def test_arguments_in_a_plain_dataclass(
    zoo: SimpleNamespace, assert_trains_alike: TrainsAlike
) -> None:
    class Layer(zoo.Block):  # type: ignore[name-defined]
        def forward(self, cargo: Any) -> Any:
            return zoo.Cargo(super().forward(cargo.hidden) * cargo.scale, cargo.scale)

    class Net(zoo.Stack):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__(blocks=1)
            self.blocks = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cargo = zoo.Cargo(self.stem(x), 0.5)
            for block in self.blocks:
                cargo = block(cargo)
            return self.head(cargo.hidden)

    for seed in SEEDS:
        assert_trains_alike(lambda: zoo.workload(Net), seed)


def test_a_parameter_as_an_argument_stays_a_parameter(
    zoo: SimpleNamespace, assert_trains_alike: TrainsAlike
) -> None:
    """It came back as a plain tensor, for which compiled code was compiled anew in the step."""
    seen: list[type] = []

    class Layer(zoo.Block):  # type: ignore[name-defined]
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            seen.append(type(scale))
            return super().forward(x) * scale

    class Net(zoo.Stack):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__(blocks=1)
            self.blocks = nn.ModuleList(Layer() for _ in range(3))
            self.scale = nn.Parameter(torch.ones(zoo.WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x, self.scale)
            return self.head(x)

    for seed in SEEDS:
        assert_trains_alike(lambda: zoo.workload(Net), seed)
    assert set(seen) == {nn.Parameter}


@pytest.mark.parametrize("runs", [[(0, 4)], [(0, 1)], [(0, 3)]])
def test_blocks_that_change_their_input_inside_a_run(
    zoo: SimpleNamespace,
    recomputing: Callable[..., Any],
    run_numbers: Callable[..., Any],
    assert_same: Callable[..., None],
    runs: list[tuple[int, int]],
) -> None:
    def build() -> Workload:
        return zoo.workload(lambda: zoo.PreActivationNet(reads_input=True), zoo.images)

    plain, planned = build(), build()
    with recomputing(planned, runs=runs) as engine:
        assert_same(run_numbers(planned, 2), run_numbers(plain, 2))
    assert engine.replays == 2


def test_a_block_that_changes_a_tensor_from_further_back(
    zoo: SimpleNamespace, assert_trains_alike: TrainsAlike
) -> None:
    class Adding(zoo.Block):  # type: ignore[name-defined]
        def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            total.add_(x.detach().mean())
            return x * total

    class Net(zoo.Stack):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__(blocks=1)
            self.blocks = nn.ModuleList([zoo.Block(), zoo.Block(), Adding(), Adding()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = torch.ones(())
            x = self.blocks[1](self.blocks[0](self.stem(x)))
            x = self.blocks[2](x, total.clone())
            return self.head(self.blocks[3](x, total.clone()))

    for seed in SEEDS:
        assert_trains_alike(lambda: zoo.workload(Net), seed)


def test_a_tensor_changed_after_a_run_used_it_is_an_error_not_a_wrong_gradient(
    zoo: SimpleNamespace, recomputing: Callable[..., Any]
) -> None:
    class Shifted(zoo.Block):  # type: ignore[name-defined]
        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
            return super().forward(x + shift)

    class Net(zoo.Stack):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__(blocks=1)
            self.blocks = nn.ModuleList([zoo.Block(), Shifted(), zoo.Block()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shift = torch.ones(())
            x = self.blocks[1](self.blocks[0](self.stem(x)), shift)
            x = self.head(self.blocks[2](x))
            shift.add_(1)
            return x

    workload = zoo.workload(Net)
    workload.compute_loss().backward()  # the plain step may do it
    with recomputing(workload, runs=[(1, 3)]):
        loss = workload.compute_loss()
        with pytest.raises(RuntimeError, match="changed in place"):
            loss.backward()


def test_five_steps_of_training_give_the_same_weights(
    zoo: SimpleNamespace, assert_trains_alike: TrainsAlike
) -> None:
    assert_trains_alike(lambda: zoo.workload(zoo.Stack), seed=2, steps=5)
    assert_trains_alike(lambda: zoo.workload(zoo.ConvNet, zoo.images), seed=2, steps=5)


def test_gradients_accumulate_over_two_backwards(
    zoo: SimpleNamespace, recomputing: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    def gradients(workload: Workload) -> dict[str, Any]:
        torch.manual_seed(3)
        for part in workload.batch.split(2):
            workload.compute_loss(part).backward()
        return {n: p.grad for n, p in workload.model.named_parameters()}

    expected = gradients(zoo.workload(zoo.Stack))
    planned = zoo.workload(zoo.Stack)
    with recomputing(planned, seed=0):
        assert_same(gradients(planned), expected)


def test_two_forwards_before_one_backward(
    zoo: SimpleNamespace, recomputing: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    def gradients(workload: Workload) -> dict[str, Any]:
        torch.manual_seed(3)
        one, other = (workload.compute_loss(part) for part in workload.batch.split(2))
        (one + 2 * other).backward()
        return {n: p.grad for n, p in workload.model.named_parameters()}

    expected = gradients(zoo.workload(zoo.Stack))
    planned = zoo.workload(zoo.Stack)
    with recomputing(planned, seed=0):
        assert_same(gradients(planned), expected)


def test_a_graph_that_is_kept_can_be_walked_twice(
    zoo: SimpleNamespace, recomputing: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    def gradients(workload: Workload) -> dict[str, Any]:
        torch.manual_seed(3)
        loss = workload.compute_loss()
        loss.backward(retain_graph=True)
        loss.backward()
        return {n: p.grad for n, p in workload.model.named_parameters()}

    expected = gradients(zoo.workload(zoo.Stack))
    planned = zoo.workload(zoo.Stack)
    with recomputing(planned, seed=1):
        assert_same(gradients(planned), expected)


def test_only_what_is_in_a_run_is_recomputed(
    zoo: SimpleNamespace, recomputing: Callable[..., Any]
) -> None:
    workload = zoo.workload(zoo.Stack)
    counts = {name: 0 for name, _ in workload.model.named_modules()}

    def count(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[name] += 1

        return hook

    for name, module in workload.model.named_modules():
        module.register_forward_hook(count(name))
    with recomputing(workload, runs=[(2, 3)]) as engine:
        counts = dict.fromkeys(counts, 0)
        workload.compute_loss().backward()
    assert engine.replays == 1, "the run is repeated as one"
    # Layers inside the recomputed blocks run twice; the blocks' own hooks see one call.
    assert counts["blocks.0.up"] == counts["blocks.3.up"] == 1
    assert counts["blocks.1.up"] == counts["blocks.2.up"] == 2
    assert all(counts[f"blocks.{i}"] == 1 for i in range(4))
    assert counts[""] == counts["stem"] == counts["head"] == 1


def test_backward_hooks_fire_as_often_as_in_the_plain_step(
    zoo: SimpleNamespace, recomputing: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    def build() -> Workload:
        workload = zoo.workload(zoo.Stack)
        workload.batch.requires_grad_()  # or torch warns about hooks on the first layer
        return workload

    def calls(workload: Workload) -> tuple[list[str], list[torch.Tensor]]:
        fired: list[str] = []
        seen: list[torch.Tensor] = []

        def note(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, incoming: Any, outgoing: Any) -> None:
                fired.append(name)
                seen.append(outgoing[0].clone())

            return hook

        for name, module in workload.model.named_modules():
            module.register_full_backward_hook(note(name))
        torch.manual_seed(3)
        workload.compute_loss().backward()
        return fired, seen

    expected = calls(build())
    planned = build()
    with recomputing(planned, seed=0):
        fired, seen = calls(planned)
    assert fired == expected[0]
    assert_same(seen, expected[1])


def test_no_grad_and_eval_pass_through(
    zoo: SimpleNamespace, recomputing: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    workload = zoo.workload(zoo.ConvNet, zoo.images)
    workload.model.eval()
    with torch.no_grad():
        expected = workload.model(workload.batch)
    with recomputing(workload, seed=1) as engine:
        with torch.no_grad():
            assert_same(workload.model(workload.batch), expected)
        assert engine.replays == 0
        with torch.inference_mode():
            assert_same(workload.model(workload.batch), expected)
        # Evaluation with gradients is recomputed, to the same numbers.
        loss = workload.compute_loss()
        loss.backward()
        assert engine.replays > 0
        assert_same(loss.detach(), expected.square().mean())


def test_an_evaluation_between_the_calls_of_two_steps_shifts_nothing(
    zoo: SimpleNamespace, recomputing: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    plain, planned = (zoo.workload(zoo.Siamese, loss=_twice) for _ in range(2))
    # Only blocks of the second call of the model are recomputed.
    with recomputing(planned, runs=[(6, 6), (7, 8)]) as engine:
        for _ in range(2):
            planned.model.eval()
            with torch.no_grad():
                planned.model(planned.batch)
            planned.model.train()
            torch.manual_seed(3)
            planned.compute_loss().backward()
    torch.manual_seed(3)
    plain.compute_loss().backward()
    torch.manual_seed(3)
    plain.compute_loss().backward()
    assert engine.replays == 4
    for (name, p), (_, q) in zip(
        planned.model.named_parameters(), plain.model.named_parameters(), strict=True
    ):
        assert torch.equal(p.grad, q.grad), name


def test_an_evaluation_between_the_two_calls_of_one_step_shifts_nothing(
    zoo: SimpleNamespace, recomputing: Callable[..., Any]
) -> None:
    workload = zoo.workload(zoo.Siamese, loss=_twice)
    model, batch = workload.model, workload.batch
    counts = [0]
    # Only blocks of the second call of the model are recomputed.
    with recomputing(workload, runs=[(6, 6), (7, 8)]) as engine:
        first = model(batch)
        model.eval()
        with torch.no_grad():
            model(batch)
        model.train()
        model.stack.blocks[0].up.register_forward_hook(lambda *_: counts.append(1))
        second = model(batch.flip(0))
        (first - second).square().mean().backward()
    assert engine.replays == 2
    assert sum(counts) == 2, "the second call of the block ran, and was repeated"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["blocks.1", "blocks.2.down", "head"])
def test_an_exception_in_the_middle_leaves_the_model_usable(
    zoo: SimpleNamespace,
    recomputing: Callable[..., Any],
    run_numbers: Callable[..., Any],
    assert_same: Callable[..., None],
    error: type[BaseException],
    where: str,
) -> None:
    plain, planned = zoo.workload(zoo.Stack), zoo.workload(zoo.Stack)

    def fail(*_: Any) -> None:
        raise error("in the middle")

    with recomputing(planned, runs=[(1, 3), (4, 4)]):
        hook = planned.model.get_submodule(where).register_forward_pre_hook(fail)
        for _ in range(2):
            with pytest.raises(error):
                planned.compute_loss()
        hook.remove()
        # Nothing of the broken run is left to catch what others save.
        x = torch.ones(3, requires_grad=True)
        (x * x).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0))
        assert_same(run_numbers(planned, 2), run_numbers(plain, 2))


def test_an_exception_in_a_block_of_a_model_that_is_never_called(
    zoo: SimpleNamespace, recomputing: Callable[..., Any]
) -> None:
    """No call of the model will tell that the step is over: the block itself must clean up."""
    workload = zoo.workload(zoo.Stack, loss=_direct)

    def fail(*_: Any) -> None:
        raise ValueError("in the middle")

    with recomputing(workload, runs=[(1, 3)]):
        hook = workload.model.blocks[1].up.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="in the middle"):
            workload.compute_loss()
        hook.remove()
        # With the hooks of the broken run still there, this backward would repeat the run.
        x = torch.ones(3, requires_grad=True)
        y = x.exp()
        y.sum().backward()
        assert torch.equal(x.grad, y)


def test_an_exception_in_the_loss_leaves_the_model_usable(
    zoo: SimpleNamespace,
    recomputing: Callable[..., Any],
    run_numbers: Callable[..., Any],
    assert_same: Callable[..., None],
) -> None:
    plain, planned = zoo.workload(zoo.Stack), zoo.workload(zoo.Stack)
    with recomputing(planned, seed=0):
        for _ in range(2):
            output = planned.model(planned.batch)  # never used
        del output
        assert_same(run_numbers(planned, 1), run_numbers(plain, 1))


def test_nothing_of_a_step_stays_behind(
    zoo: SimpleNamespace, recomputing: Callable[..., Any]
) -> None:
    workload = zoo.workload(zoo.Stack)
    kept: list[weakref.ref[torch.Tensor]] = []

    def remember(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        kept.append(weakref.ref(output))

    for block in workload.model.blocks:
        block.register_forward_hook(remember)
    gc.collect()
    gc.disable()
    try:
        with recomputing(workload, seed=0):
            kept.clear()
            workload.compute_loss().backward()
            assert len(kept) == 4
            assert [r() for r in kept] == [None] * 4, "freed without the garbage collector"
    finally:
        gc.enable()


def test_state_dict_and_named_modules_are_those_of_the_plain_model(
    zoo: SimpleNamespace, recomputing: Callable[..., Any]
) -> None:
    plain, planned = zoo.workload(zoo.ConvNet, zoo.images), zoo.workload(zoo.ConvNet, zoo.images)
    with recomputing(planned, seed=0):
        assert list(planned.model.state_dict()) == list(plain.model.state_dict())
        assert [n for n, _ in planned.model.named_modules()] == [
            n for n, _ in plain.model.named_modules()
        ]
        planned.model.load_state_dict(plain.model.state_dict())
    assert all("forward" not in m.__dict__ for m in planned.model.modules())


def test_functional_dropout_inside_a_block(
    zoo: SimpleNamespace, assert_trains_alike: TrainsAlike
) -> None:
    class Layer(zoo.Block):  # type: ignore[name-defined]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noise = torch.randn_like(x) * 0.1
            return F.dropout(super().forward(x + noise), 0.3, self.training)

    class Net(zoo.Stack):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__(blocks=1)
            self.blocks = nn.ModuleList(Layer() for _ in range(4))

    for seed in SEEDS:
        assert_trains_alike(lambda: zoo.workload(Net), seed)


def test_random_runs_reach_chains_and_singles(zoo: SimpleNamespace) -> None:
    """The tests above only mean something if the segments chain."""
    workload = zoo.workload(zoo.Stack)
    with untouched(workload):
        segments, _ = find_segments(workload)
    assert [bool(s.linked) for s in segments] == [False, True, True, True, True, True]
