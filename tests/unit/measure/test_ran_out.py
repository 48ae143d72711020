"""Running out of memory: where in the step, after what, and with what live."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import DeviceMemoryError
from memfit.measure.ran_out import Stages, ended_by, place_in_step, told_how_far
from memfit.units import format_bytes

NO_ROOM = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB."


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError(NO_ROOM)


class Layer(nn.Linear):
    fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails == "forward":
            raise torch.OutOfMemoryError(NO_ROOM)
        y = super().forward(x)
        return FailsInBackward.apply(y) if self.fails == "backward" else y


class Optimizer(torch.optim.Adam):
    fails = False

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        if self.fails:
            raise torch.OutOfMemoryError(NO_ROOM)
        return found


def failing(where: str) -> memfit.Workload:
    model = nn.Sequential(Layer(8, 64), nn.ReLU(), Layer(64, 8))
    model[2].fails = where
    optimizer = Optimizer(model.parameters())
    optimizer.fails = where == "optimizer"

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    return memfit.Workload(model, loss_fn, optimizer, torch.ones(32, 8), name="failing")


PLACES = [
    ("forward", "finding segments", "forward at 2", "activations"),
    ("backward", "warming up", "backward", "activations"),
    ("optimizer", "warming up", "the optimizer's step", "optimizer state"),
]


@pytest.mark.parametrize(("where", "doing", "place", "kind"), PLACES)
def test_a_profile_without_memory_says_how_far_it_came(
    where: str, doing: str, place: str, kind: str
) -> None:
    """It said no more than that there is none."""
    workload = failing(where)
    before = [p.detach().clone() for p in workload.model.parameters()]
    with pytest.raises(DeviceMemoryError, match=r"Tried to allocate 2\.00 GiB\. It ") as caught:
        memfit.fit_workload(workload, "90%", executor="module")
    ended = caught.value.ended
    assert (ended.doing, ended.place) == (doing, place)
    assert ended.words in caught.value.message and f"while {doing}, in {place}" in ended.words
    assert ended.stages[0].doing == "measuring copies to the host"
    weights = sum(p.nbytes for p in workload.model.parameters())
    assert ended.kinds["parameters"] >= weights and ended.kinds["batch"] >= 32 * 8 * 4
    assert ended.kinds[kind] > 0
    assert caught.value.hint and caught.value.exit_code == 4 and caught.value.learned is None
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    torch.testing.assert_close(list(workload.model.parameters()), before, rtol=0, atol=0)
    assert all(p.grad is None for p in workload.model.parameters())
    assert not workload.optimizer.state, "it is left as it was"


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """As in a process of its own: tests freeze what is there, and a fit then freezes nothing."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.parametrize("where", [where for where, *_ in PLACES])
def test_what_a_fit_has_frozen_is_counted_to_the_byte(where: str, nothing_frozen: None) -> None:
    """Parameters and gradients were missing: the census does not see frozen objects."""
    workload = failing(where)
    weights = sum(p.nbytes for p in workload.model.parameters())
    with pytest.raises(DeviceMemoryError) as caught:
        memfit.fit_workload(workload, "90%", executor="module")
    kinds = caught.value.ended.kinds
    assert (kinds["parameters"], kinds["batch"]) == (weights, 32 * 8 * 4)
    if where == "optimizer":
        steps = 4 * len(list(workload.model.parameters()))
        assert (kinds["gradients"], kinds["optimizer state"]) == (weights, 2 * weights + steps)
    assert f"{format_bytes(weights)} parameters" in caught.value.message


def test_after_the_profile_it_is_there() -> None:
    workload = failing("")
    profile = memfit.profile(workload, executor="module")
    stages = Stages()
    stages("planning")
    with pytest.raises(DeviceMemoryError) as caught, told_how_far(workload, stages, profile):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
    assert caught.value.learned is profile and caught.value.ended.doing == "planning"
    assert caught.value.ended.place == ""


def test_the_stages_around_another_run_are_added() -> None:
    workload, outer, inner = failing(""), Stages(), Stages()
    outer("trying tiled_loss")
    inner("warming up")
    with (
        pytest.raises(DeviceMemoryError) as caught,
        told_how_far(workload, outer, "a profile"),
        told_how_far(workload, inner),
    ):
        raise MemoryError("no room")
    stages = [stage.doing for stage in caught.value.ended.stages]
    assert stages == ["trying tiled_loss", "warming up"] and caught.value.learned == "a profile"


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("no"), KeyboardInterrupt()])
def test_other_errors_stay_as_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, told_how_far(failing(""), Stages()):
        raise error
    assert caught.value is error


def test_an_error_outside_of_any_step_has_no_place() -> None:
    assert place_in_step(ValueError("never raised"), nn.Linear(1, 1)) == ""


def test_what_the_failed_step_held_is_free_once_the_error_is_handled() -> None:
    workload = failing("forward")
    held: list[weakref.ref[torch.Tensor]] = []
    workload.model[1].register_forward_hook(lambda *call: held.append(weakref.ref(call[-1])))

    def handled() -> str:
        try:
            workload.compute_loss()
        except torch.OutOfMemoryError as error:
            return ended_by(error, workload, Stages()).words
        return ""

    gc.disable()  # free at once, not when the garbage is collected
    try:
        assert "in forward at 2" in handled()
        assert [reference() for reference in held] == [None]
    finally:
        gc.enable()


def test_stages_are_told_and_kept() -> None:
    said: list[str] = []
    stages = Stages(said.append)
    stages("one")
    stages("two")
    assert said == ["one", "two"] and Stages.of(stages) is stages
    assert [s.doing for s in stages.so_far()] == said
    assert all(s.seconds >= 0 for s in stages.so_far())
    assert Stages(None).so_far() == ()
