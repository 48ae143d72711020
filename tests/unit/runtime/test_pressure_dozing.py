"""A safety valve that dozes: no hooks while memory is far from short, and how it wakes."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.runtime.pressure import attention, gauge, module_calls, saved_tensors
from memfit.runtime.pressure.innards import hooks_in_force
from memfit.runtime.pressure.module_calls import ModuleCalls
from memfit.runtime.pressure.saved import Saved
from memfit.runtime.pressure.valve import Valve

ROW = 1000  # floats
UNIT = 4 * ROW
MODELS = [("ConvNet", "images"), ("AttentionNet", "sequences"), ("Reused", "sequences")]


class Allocator:
    """Memory of the tensors it is told of, as CUDA's allocator would count it."""

    counts = False
    look_every = 1

    def __init__(self) -> None:
        self.storages: list[ref[Any]] = []
        self.others = 0
        self.looks = 0

    def allocated(self) -> int:
        self.looks += 1
        storages = [reference() for reference in self.storages]
        return self.others + sum(s.nbytes() for s in storages if s is not None)

    def added(self, size: int) -> None:
        pass

    def removed(self, size: int) -> None:
        pass


class Layer(nn.Module):
    """Saves one tensor for each row it is given: its number, counted in the model."""

    def __init__(self, allocator: Allocator, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.allocator, self.number = allocator, number

    def forward(self, total: torch.Tensor, rows: int) -> torch.Tensor:
        tensor = torch.full((rows * ROW,), float(self.number))
        self.allocator.storages.append(ref(tensor.untyped_storage()))
        return total + (self.weight * tensor)[0]


class Model(nn.Module):
    def __init__(self, allocator: Allocator, layers: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(allocator, n + 1) for n in range(layers))

    def forward(self, rows: int) -> torch.Tensor:
        total = torch.zeros(())
        for layer in self.layers:
            total = layer(total, rows)
        return total


def step(model: Model, rows: int = 1) -> None:
    """Forward and backward, and a check of the gradients."""
    model.zero_grad()
    model(rows).backward()
    for layer in model.layers:
        assert layer.weight.grad == layer.number


@pytest.fixture(params=["replaced", "monitoring"])
def monitoring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What Python has to see calls by; None: it has nothing, and Module.__call__ is replaced."""
    if request.param == "replaced":
        monkeypatch.setattr(module_calls, "_MONITORING", None)
        return None
    if not hasattr(sys, "monitoring"):
        pytest.skip("sys.monitoring came with Python 3.12")
    return sys.monitoring


@pytest.fixture
def allocator(monitoring: Any, monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """What valves ask in the test, whose calls of modules are seen in one way or the other."""
    made = Allocator()
    monkeypatch.setattr(saved_tensors, "gauge_for", lambda device, capacity: made)
    monkeypatch.setattr(attention, "_LOOK_S", 0.0)  # with every call
    return made


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The sizes of all saved tensors that hooks were called for."""
    sizes: list[torch.Size] = []
    pack = saved_tensors.SavedTensors.pack

    def counted(self: Any, tensor: torch.Tensor) -> Any:
        sizes.append(tensor.shape)
        return pack(self, tensor)

    monkeypatch.setattr(saved_tensors.SavedTensors, "pack", counted)
    return sizes


@pytest.fixture(autouse=True)
def nothing_left(frozen_garbage: None) -> Iterator[None]:
    yield
    assert hooks_in_force() is None
    gc.collect()
    left = [o for o in gc.get_objects() if isinstance(o, Saved)]
    assert not left, f"{len(left)} saved tensors were left behind"


def valve(threshold: float = 0.8, units: int = 40) -> Valve:
    return memfit.pressure(
        threshold, capacity=units * UNIT, device="cpu", min_tensor_bytes=64, host_budget="1GiB"
    )


def test_a_quiet_step_leaves_the_next_ones_without_hooks(
    allocator: Allocator, packed: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_LOOK_S", 1e9)
    model = Model(allocator)
    with valve() as idle:
        step(model)
        of_a_step = len(packed)
        assert of_a_step >= 10, "the first step is looked at closely"
        assert not idle.dozes
        step(model)
        assert idle.dozes
        assert len(packed) == of_a_step + 1, "the first tensor of the second one tells"
        looks = allocator.looks
        for _ in range(20):
            step(model)
    assert len(packed) == of_a_step + 1
    assert allocator.looks == looks, "next to nothing went into modules"
    assert len(idle._saved_tensors._here) <= 1, "closing has nothing to go through"
    assert idle.statistics.swaps == 0
    assert idle.statistics.highest_bytes >= 9 * UNIT


def test_bytes_that_go_into_modules_are_worth_a_look(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_LOOK_S", 1e9)
    model, module, batch = Model(allocator), nn.Identity(), torch.ones(ROW)
    with valve():
        step(model)
        step(model)
        module(batch)
        looks = allocator.looks
        for _ in range(40):
            module(batch)
        # 24 units of room, of which modules may take 16 for each that goes in
        assert 20 <= allocator.looks - looks <= 40
        allocator.others = 20 * UNIT
        looks = allocator.looks
        for _ in range(10):
            module(batch)
        assert allocator.looks - looks == 10


def test_the_first_step_is_safe(allocator: Allocator, moved: list[float]) -> None:
    with valve(units=8) as busy:
        step(Model(allocator))
        assert not busy.dozes
    assert moved[:3] == [1, 2, 3]
    assert busy.statistics.swaps == busy.statistics.retrievals > 0


def test_pressure_that_begins_in_the_middle_of_a_forward_is_met(
    allocator: Allocator, moved: list[float]
) -> None:
    model = Model(allocator)
    with valve() as busy:
        step(model)
        step(model)
        assert busy.dozes and not moved
        step(model, rows=6)  # 60 units where there are 40
        assert moved[:4] == [1, 2, 3, 4], "the longest idle first, from before it woke"
        assert busy.statistics.swaps == busy.statistics.retrievals > 0
        assert busy.statistics.highest_bytes < 40 * UNIT
        swaps = busy.statistics.swaps
        step(model, rows=6)
        assert not busy.dozes and busy.statistics.swaps > swaps
        swaps = busy.statistics.swaps
        for _ in range(3):
            step(model)
        assert busy.dozes and busy.statistics.swaps == swaps
        step(model, rows=6)
        assert busy.statistics.swaps > swaps, "again"


def test_memory_that_others_take_wakes_it_too(allocator: Allocator, moved: list[float]) -> None:
    model = Model(allocator)

    def take(module: nn.Module, args: Any) -> None:
        allocator.others = 30 * UNIT

    with valve() as busy:
        step(model)
        step(model)
        model.layers[5].register_forward_pre_hook(take)
        step(model)
    assert moved[:3] == [1, 2, 3]
    assert busy.statistics.swaps > 0


def test_entered_around_each_step(allocator: Allocator, packed: list[torch.Size]) -> None:
    model, idle = Model(allocator), valve()
    for _ in range(2):
        with idle:
            step(model)
    packed.clear()
    for _ in range(3):
        with idle:
            step(model)
        assert hooks_in_force() is None
    assert not packed and idle.dozes
    with idle:
        step(model, rows=6)
    assert idle.statistics.swaps > 0


def test_one_changed_in_place_before_it_woke_is_an_error_as_without_the_valve(
    allocator: Allocator,
) -> None:
    model = Model(allocator)
    weight = torch.ones(ROW, requires_grad=True)
    with valve() as busy:
        step(model)
        step(model)
        hidden = weight * 2
        loss = hidden.square().sum()
        hidden.add_(1)
        allocator.others = 39 * UNIT
        nn.Identity()(loss)
        assert not busy.dozes
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_one_changed_in_place_after_it_was_taken_in_is_an_error_too(allocator: Allocator) -> None:
    model = Model(allocator)
    weight = torch.ones(ROW, requires_grad=True)
    with valve() as busy:
        step(model)
        step(model)
        hidden = weight * 2
        loss = hidden.square().sum()
        allocator.others = 25 * UNIT
        nn.Identity()(loss)
        assert not busy.dozes
        hidden.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_it_does_not_wake_inside_the_hooks_of_others(allocator: Allocator) -> None:
    model = Model(allocator)
    other = saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
    with valve() as busy:
        step(model)
        step(model)
        allocator.others = 25 * UNIT
        with other:
            step(model)
            assert busy.dozes
        assert hooks_in_force() is None
        step(model)
        assert not busy.dozes


def test_what_others_hooked_is_not_read_when_it_wakes(allocator: Allocator) -> None:
    model, runs = Model(allocator), []

    def counted(total: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return model.layers[0](total, 1)

    with valve() as busy:
        step(model)
        step(model)
        loss = checkpoint(counted, torch.ones((), requires_grad=True), use_reentrant=False)
        allocator.others = 25 * UNIT
        loss = model.layers[1](loss, 1)
        assert not busy.dozes
        assert len(runs) == 1
        loss.backward()
        assert len(runs) == 2


class Several(torch.autograd.Function):
    """Saves an input, nothing, and a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, None, torch.full_like(x, 2.0))
        return x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        first, nothing, second = ctx.saved_tensors
        assert nothing is None
        return gradients[0] * first + second


def test_all_kinds_of_nodes_have_their_tensors_taken_in(
    allocator: Allocator, moved: list[float]
) -> None:
    model = Model(allocator)
    weight = torch.ones(ROW, requires_grad=True)

    def loss() -> torch.Tensor:
        hidden = Several.apply(weight * 5)
        hidden = torch.stack([hidden.relu(), hidden.square()]).mean(0)
        return nn.Identity()(hidden.sum())

    loss().backward()
    expected, weight.grad = weight.grad, None
    with valve() as busy:
        step(model)
        step(model)
        allocator.others = 39 * UNIT
        result = loss()
        assert not busy.dozes
        assert moved[:3] == [5.0, 2.0, 15.0], "input, own tensor, and what relu and square saved"
        result.backward()
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=0)
    assert busy.statistics.swaps == busy.statistics.retrievals > 2


class Broken(nn.Module):
    def forward(self, total: torch.Tensor) -> torch.Tensor:
        raise ValueError("mine")


def test_an_exception_after_it_woke_releases_everything(
    allocator: Allocator, moved: list[float]
) -> None:
    model = Model(allocator)
    busy = valve()
    with busy:
        step(model)
        step(model)
    with pytest.raises(ValueError, match="mine"), busy:
        Broken()(model(6))
    assert moved and hooks_in_force() is None
    gc.collect()
    assert busy._saved_tensors._host.capacity_bytes == 0
    with busy:
        step(model)


def test_calls_in_another_thread_do_not_wake_it(allocator: Allocator) -> None:
    model = Model(allocator)
    with valve() as idle:
        step(model)
        step(model)
        allocator.others = 35 * UNIT
        thread = threading.Thread(target=lambda: step(model))
        thread.start()
        thread.join()
        assert idle.dozes


def test_calls_in_a_forked_process_do_not_ask_the_device(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(allocator)
    with valve() as idle:
        step(model)
        step(model)
        looks = allocator.looks
        monkeypatch.setattr(attention.os, "getpid", lambda: -1)
        step(model)
        assert idle.dozes and allocator.looks == looks


def test_the_numbers_stay(
    allocator: Allocator,
    zoo: Any,
    run_numbers: Callable[..., Any],
    assert_same: Callable[..., None],
) -> None:
    def wake(module: nn.Module, args: Any) -> None:
        allocator.others = 10**6

    for name, batch in MODELS:
        allocator.others = 0
        plain, swapped = (zoo.workload(getattr(zoo, name), getattr(zoo, batch)) for _ in "ab")
        run_numbers(plain, 2)
        expected = run_numbers(plain, 2)
        with valve(0.5, units=100) as busy:
            run_numbers(swapped, 2)
            assert busy.dozes
            *_, late = (m for m in swapped.model.modules() if list(m.parameters()))
            late.register_forward_pre_hook(wake)
            actual = run_numbers(swapped, 2)
        assert busy.statistics.swaps == busy.statistics.retrievals > 0
        assert_same(actual, expected)


def test_it_never_dozes_on_a_real_cpu_nor_where_everything_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for threshold in (0.8, 0):
        model = Model(Allocator())
        with valve(threshold) as awake:
            for _ in range(3):
                step(model)
            assert not awake.dozes


def test_calls_are_left_out_while_they_cannot_fill_the_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Room:
        capacity, looks, free = 10**6, 0, 640

        def read_capacity(self) -> None: ...

        def room(self) -> int:
            self.looks += 1
            return self.free

    def left_out(bytes_in: int) -> int:
        calls, until = watching._called(torch.ones(bytes_in // 4) if bytes_in else None)
        assert not calls or 0 < until - time.monotonic() <= 0.01  # ten times 1 ms, if all is free
        return calls

    monkeypatch.setattr(attention, "_LOOK_S", 0.001)
    monkeypatch.setattr(attention.time, "monotonic", lambda: 5.0)
    room: Any = Room()
    watching = attention.Attention(room)
    watching._dozes = True
    watching.begin()
    watching._seen = 10**4
    try:
        assert left_out(0) == 0 and room.looks == 1  # how large they are is not known
        # 640 bytes of room are 40 that may go into modules: 4 now, and 4 each nine times.
        assert left_out(4) == 9 and room.looks == 1
        assert left_out(4) == 10 and room.looks == 2
        assert left_out(40) == 1 and room.looks == 3
        room.free = 10**6
        assert left_out(4) == 32 and room.looks == 4
        watching._seen = 63
        assert left_out(4) == 4, "it has not seen much yet"
    finally:
        watching.end()


def test_calls_are_seen_until_they_are_not_wanted(monitoring: Any) -> None:
    seen: list[object] = []
    calls, linear, value = ModuleCalls(), nn.Linear(2, 2), torch.ones(1, 2)
    before = nn.Module.__call__

    def called(argument: object) -> tuple[int, float]:
        seen.append(argument)
        return 2 if len(seen) == 3 else 0, float("inf")

    calls.start(called)
    nn.Sequential(linear)(value)
    linear(input=value)
    for _ in range(3):  # two are left out
        linear(value)
    calls.stop()
    calls.stop()
    linear(value)
    assert seen[0] is value and seen[1] is value and seen[2] is None
    assert seen[3] is value and len(seen) == 4
    assert nn.Module.__call__ is before
    if monitoring is not None:
        assert monitoring.get_tool(3) is None and monitoring.get_tool(4) is None


def test_where_others_monitor_calls_are_seen_all_the_same() -> None:
    if not hasattr(sys, "monitoring"):
        pytest.skip("sys.monitoring came with Python 3.12")
    monitoring: Any = sys.monitoring
    monitoring.use_tool_id(3, "other")
    monitoring.use_tool_id(4, "other")
    try:
        _seen_by(lambda: None)
    finally:
        monitoring.free_tool_id(3)
        monitoring.free_tool_id(4)


def test_a_call_that_someone_else_replaces_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_calls, "_MONITORING", None)
    before: Any = nn.Module.__call__
    theirs: list[object] = []

    def put_theirs() -> None:
        beneath: Any = nn.Module.__call__

        def other(self: nn.Module, *args: Any) -> Any:
            theirs.append(args)
            return beneath(self, *args)

        nn.Module.__call__ = other  # type: ignore[method-assign]

    try:
        _seen_by(put_theirs)
        assert len(theirs) == 2, "of three calls those after it"
        assert not ModuleCalls().start(lambda argument: (0, 0.0)), "theirs may call ours"
    finally:
        nn.Module.__call__ = before  # type: ignore[method-assign]
    _seen_by(lambda: None)


def test_it_stays_awake_where_others_have_replaced_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module_calls, "_MONITORING", None)
    before: Any = nn.Module.__call__
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *args: before(self, *args))
    made = Allocator()
    monkeypatch.setattr(saved_tensors, "gauge_for", lambda device, capacity: made)
    with valve() as awake:
        for _ in range(3):
            step(Model(made))
        assert not awake.dozes


def _seen_by(meanwhile: Callable[[], None]) -> None:
    """A call is seen, before something happens and after it, and none when that is over."""
    seen: list[object] = []
    calls, linear, value = ModuleCalls(), nn.Linear(2, 2), torch.ones(1, 2)

    def called(argument: object) -> tuple[int, float]:
        seen.append(argument)
        return 0, 0.0

    calls.start(called)
    linear(value)
    meanwhile()
    linear(value)
    assert len(seen) == 2
    calls.stop()
    linear(value)
    assert len(seen) == 2


def test_what_is_compiled_meanwhile_is_whole_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_calls, "_MONITORING", None)
    seen: list[object] = []
    model, value = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)
    graphs: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: model(x) + 1, fullgraph=True, backend=backend)
    calls = ModuleCalls()
    calls.start(lambda argument: (seen.append(argument), (0, 0.0))[1])
    try:
        for _ in range(2):
            torch.testing.assert_close(compiled(value), model(value) + 1)
        assert len(graphs) == 1 and len(seen) == 2 * 3  # of what is not compiled
    finally:
        calls.stop()
    compiled(value)
    assert len(graphs) == 1


def test_marks_leave_a_gap() -> None:
    marks = gauge.Marks(high=100, low=70, capacity=120, always=False)
    assert marks.quiet < marks.awake < marks.high
