"""What moves, when it goes and comes, and what is left when something goes wrong: nothing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from memfit.errors import UsageError
from memfit.ir.swap import Traffic
from memfit.runtime.recompute import Recompute
from memfit.runtime.swap.arena import Arena
from memfit.runtime.swap.engine import CallMoves, Swap
from memfit.runtime.swap.lanes import Copy, Lanes, lanes_for
from memfit.runtime.swap.moved import Handle, Kept, Moved
from memfit.runtime.swap.schedule import Step

STACK = ["stem", *(f"blocks.{i}" for i in range(4)), "head"]


class Twice(nn.Module):
    """Saves one tensor twice, its weight, a view of its weight and a small tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))
        self.register_buffer("scale", torch.randn(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight.t() * self.scale
        y = y * y * y.mean(0, keepdim=True)
        return y.sum(1)


def test_a_tensor_saved_twice_moves_once_and_parameters_and_small_ones_never(
    swapping: SimpleNamespace,
) -> None:
    model, x = Twice(), torch.randn(64, 32)
    moves = {0: CallMoves(None, 1024, 1, 1)}
    engine = swapping.swapped(nn.Sequential(model), ["0"], moves=moves, static=[x])
    with engine as at_work:
        at_work.router.model(x).sum().backward()
        statistics = at_work.engine.statistics()
        # y and y * y, each saved twice or with something else; not x, weight, scale, the mean
        assert statistics.moves == statistics.retrievals == 2
        assert statistics.moved_bytes == statistics.restored_bytes == 2 * x.nbytes
        assert statistics.host_highest_bytes == 2 * x.nbytes


def test_one_tensor_saved_twice_and_its_weight_exactly_one_is_moved(
    swapping: SimpleNamespace,
) -> None:
    class Squared(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y * y

    x = torch.randn(16, 8)
    model = nn.Sequential(Squared(8, 8))
    with swapping.swapped(model, ["0"], static=[x]) as at_work:
        model(x).sum().backward()
        statistics = at_work.engine.statistics()
    assert statistics.moves == statistics.retrievals == 1
    assert statistics.moved_bytes == 16 * 8 * 4


def test_a_batch_that_is_kept_does_not_move(swapping: SimpleNamespace) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with swapping.swapped(model, ["0"]) as at_work:
        for moves in (1, 1):
            batch = torch.randn(16, 8)
            model(batch).sum().backward()
            at_work.engine.keep([batch, torch.eye(2).to_sparse()])
            model(batch).sum().backward()
            assert at_work.engine.statistics().moves == moves
            at_work.engine.reset_statistics()
    assert at_work.engine.statistics().steps == 0


def test_memory_is_let_go_and_comes_back_at_the_named_points(swapping: SimpleNamespace) -> None:
    """Call i saves i + 1 KiB. Calls 0 and 1 move: gone at 2 and 3, back with 2 and with the end."""

    class Power(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.rows = rows

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            lanes.log.append(("forward", self.rows))
            y = x.repeat(self.rows, 1) if self.rows > 1 else x
            x = y.square()[:1]
            if x.requires_grad:
                x.register_hook(lambda gradient: lanes.log.append(("backward", self.rows)))
            return x

    lanes = swapping.LazyLanes()
    model = nn.Sequential(*(Power(i + 1) for i in range(4)))
    moves = {0: CallMoves(None, 1, 2, 2), 1: CallMoves(None, 1, 3, 4)}
    x = torch.randn(1, 256, requires_grad=True)
    with swapping.swapped(model, list("0123"), lanes, moves=moves) as at_work:
        loss = model(x).sum()
        lanes.log.append(("loss", 0))
        loss.backward()
        statistics = at_work.engine.statistics()
    kib = 1024
    assert lanes.log == [
        ("forward", 1),
        ("out", kib),
        ("forward", 2),
        ("out", 2 * kib),
        ("wait out", kib),
        ("forward", 3),
        ("wait out", 2 * kib),
        ("forward", 4),
        ("back", 2 * kib),
        ("loss", 0),
        ("backward", 4),
        ("backward", 3),
        ("back", kib),
        ("backward", 2),
        ("wait back", 2 * kib),
        ("backward", 1),
        ("wait back", kib),
    ]
    assert statistics.late == statistics.stayed == 0
    assert statistics.out == Traffic(3 * kib, 2) and statistics.back == Traffic(3 * kib, 2)


def test_the_device_memory_is_free_after_the_forward(
    zoo: SimpleNamespace, swapping: SimpleNamespace, lanes: Lanes
) -> None:
    workload = zoo.workload(zoo.Stack)
    seen: list[StorageWeakRef] = []

    def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        seen.append(StorageWeakRef(output.untyped_storage()))

    for block in workload.model.blocks:
        block.up.register_forward_hook(note)
        block.norm.register_forward_hook(note)
    # All leaves at the end and comes back only when it is asked for.
    moves = {i: CallMoves(None, 1, len(STACK), -1) for i in range(len(STACK))}
    with swapping.swapped(workload.model, STACK, lanes, moves=moves) as at_work:
        loss = workload.compute_loss()
        assert seen and all(reference.expired() for reference in seen)
        used = at_work.arena.used_bytes
        assert used > 0
        loss.backward()
        assert at_work.arena.used_bytes == 0
        statistics = at_work.engine.statistics()
        assert statistics.late == statistics.retrievals == statistics.moves
        assert statistics.host_highest_bytes == used


def test_what_is_asked_for_before_it_left_is_not_copied_back(swapping: SimpleNamespace) -> None:
    class Walked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            return y + slope

    model = nn.Sequential(nn.Linear(8, 8), Walked())
    with swapping.swapped(model, ["1"]) as at_work:
        model(torch.randn(4, 8)).sum().backward()
        statistics = at_work.engine.statistics()
    assert statistics.moves == statistics.stayed == statistics.retrievals == 1


def test_a_graph_dropped_without_backward_frees_its_slots(
    zoo: SimpleNamespace, swapping: SimpleNamespace, lanes: Lanes
) -> None:
    workload = zoo.workload(zoo.Stack)
    for moves in (swapping.everything(len(STACK)), _early(len(STACK))):
        with swapping.swapped(workload.model, STACK, lanes, moves=moves) as at_work:
            gc.disable()
            try:
                loss = workload.compute_loss()
                assert at_work.engine.statistics().moves > 0
                del loss
                assert at_work.arena.used_bytes == 0, "something refers to itself"
            finally:
                gc.enable()


def _early(num_calls: int) -> dict[int, CallMoves]:
    """All copies back begin with the end of the forward."""
    return {i: CallMoves(None, 1, i + 1, num_calls) for i in range(num_calls)}


def _fail(*_: Any) -> None:
    raise ValueError("on purpose")


@pytest.mark.parametrize("where", ["stem", "blocks.2", "blocks.2.down", "head"])
def test_an_exception_in_the_forward_leaves_nothing_behind(
    zoo: SimpleNamespace,
    swapping: SimpleNamespace,
    lanes: Lanes,
    run_numbers: Callable[..., Any],
    assert_same: Callable[..., None],
    where: str,
) -> None:
    expected = run_numbers(zoo.workload(zoo.Stack), 2)
    workload = zoo.workload(zoo.Stack)
    hook = workload.model.get_submodule(where).register_forward_hook(_fail)
    with swapping.swapped(workload.model, STACK, lanes) as at_work:
        with pytest.raises(ValueError, match="on purpose") as error:
            workload.compute_loss()
        assert at_work.arena.used_bytes == 0, "although the traceback holds the graph"
        hook.remove()
        assert_same(run_numbers(workload, 2), expected)
        del error


@pytest.mark.parametrize("where", [1, 3])
def test_an_exception_in_the_backward_leaves_room_for_the_next_step(
    zoo: SimpleNamespace,
    swapping: SimpleNamespace,
    lanes: Lanes,
    run_numbers: Callable[..., Any],
    assert_same: Callable[..., None],
    where: int,
) -> None:
    workload = zoo.workload(zoo.Stack)
    expected = run_numbers(zoo.workload(zoo.Stack), 2)
    with swapping.swapped(workload.model, STACK, lanes) as at_work:
        workload.compute_loss()
        room = at_work.arena.highest_bytes
    with swapping.swapped(workload.model, STACK, lanes, arena_bytes=room) as at_work:
        hook = workload.model.blocks[where].register_full_backward_hook(_fail)
        loss = workload.compute_loss()
        with pytest.raises(ValueError, match="on purpose"):
            loss.backward()
        hook.remove()
        workload.optimizer.zero_grad(set_to_none=True)
        assert at_work.arena.used_bytes > 0, "the loss holds the graph, as in a training loop"
        assert_same(run_numbers(workload, 2), expected)
        assert at_work.arena.used_bytes == 0
        del loss


def test_a_failed_backward_cannot_be_walked_again_after_the_next_step_began(
    zoo: SimpleNamespace, swapping: SimpleNamespace, lanes: Lanes
) -> None:
    workload = zoo.workload(zoo.Stack)
    failing = False

    def hook(*_: Any) -> None:
        if failing:
            _fail()

    def failed_step() -> torch.Tensor:
        nonlocal failing
        loss, failing = workload.compute_loss(), True
        with pytest.raises(ValueError, match="on purpose"):
            loss.backward(retain_graph=True)
        failing = False
        return loss

    workload.model.blocks[2].register_full_backward_hook(hook)
    with swapping.swapped(workload.model, STACK, lanes):
        loss = failed_step()
        loss.backward(retain_graph=True)  # nothing else began
        workload.compute_loss().backward()
        loss.backward()  # all of it had been asked for

        loss = failed_step()
        workload.compute_loss().backward()
        with pytest.raises(UsageError, match="its step was given up") as error:
            loss.backward()
        assert error.value.hint


def _break(_: torch.Tensor) -> None:
    raise ValueError("on purpose")


def _fragile(x: torch.Tensor) -> torch.Tensor:
    """The same, but a backward fails when it comes here."""
    x = x.clone()
    x.register_hook(_break)
    return x


def test_a_backward_that_failed_before_anything_moved_was_asked_for_leaves_room(
    zoo: SimpleNamespace,
    swapping: SimpleNamespace,
    lanes: Lanes,
    run_numbers: Any,
    assert_same: Any,
) -> None:
    """What moved lies before the failure, and the error that is kept holds the graph."""
    workload, expected = zoo.workload(zoo.Stack), run_numbers(zoo.workload(zoo.Stack), 2)
    moves = {i: CallMoves(None, 1, 2, 2) for i in range(2)}
    with swapping.swapped(workload.model, STACK, lanes, moves=moves) as at_work:
        workload.compute_loss()
        room = at_work.arena.highest_bytes
    with swapping.swapped(workload.model, STACK, lanes, moves=moves, arena_bytes=room) as at_work:
        errors = []
        for _ in range(3):
            hook = workload.model.blocks[2].register_forward_hook(lambda *a: _fragile(a[-1]))
            loss = workload.compute_loss()
            with pytest.raises(ValueError, match="on purpose") as error:
                loss.backward()
            errors.append((error, loss))
            hook.remove()
        assert at_work.arena.used_bytes == room
        workload.optimizer.zero_grad(set_to_none=True)
        assert_same(run_numbers(workload, 2), expected)
        assert at_work.arena.used_bytes == 0
        del errors, error, loss


def test_a_backward_of_a_part_leaves_the_rest_for_a_later_one(
    zoo: SimpleNamespace, swapping: SimpleNamespace, lanes: Lanes, assert_same: Any
) -> None:
    """It began and came to its end: another forward gives nothing up."""

    def gradients(workload: Any) -> list[Any]:
        torch.manual_seed(3)
        one = workload.compute_loss()
        torch.autograd.grad(one, workload.model.head.weight, retain_graph=True)
        (one + workload.compute_loss()).backward()
        return [p.grad for p in workload.model.parameters()]

    expected = gradients(zoo.workload(zoo.Stack))
    workload = zoo.workload(zoo.Stack)
    moves = {i: CallMoves(None, 1, 2, 2) for i in range(2)}
    with swapping.swapped(workload.model, STACK, lanes, moves=moves) as at_work:
        assert_same(gradients(workload), expected)
        assert at_work.engine.statistics().moves > 0


def test_a_call_from_another_thread_is_refused(swapping: SimpleNamespace) -> None:
    """A model whose parts run in threads, and a model that two threads use at once."""

    class Threaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.parts[0](x)
            _in_thread(lambda: self.parts[1](x))
            return x

    class Recursive(Threaded):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.parts[0](x)
            if x.shape[0] > 1:
                _in_thread(lambda: self(x[:1]))
            return x

    for model in (Threaded(), Recursive()):
        with swapping.swapped(model, ["parts.0", "parts.1"]) as at_work:
            with pytest.raises(UsageError, match="another thread") as error:
                model(torch.randn(4, 8))
            assert error.value.hint
            assert at_work.arena.used_bytes == 0
            _in_thread(lambda model=model: model.parts[0](torch.randn(4, 8)).sum().backward())


def _in_thread(work: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_a_call_inside_a_call_is_refused(swapping: SimpleNamespace) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    with swapping.swapped(model, ["0", "0.1"]) as at_work:
        with pytest.raises(UsageError, match="call 1 began inside call 0"):
            model(torch.randn(4, 8))
        assert at_work.arena.used_bytes == 0


def test_two_engines_around_one_another(
    zoo: SimpleNamespace, swapping: SimpleNamespace, run_numbers: Any, assert_same: Any
) -> None:
    expected = run_numbers(zoo.workload(zoo.Stack), 2)
    workload = zoo.workload(zoo.Stack)
    with (
        swapping.swapped(workload.model, STACK, swapping.LazyLanes(0)),
        swapping.swapped(workload.model, STACK[1:3], swapping.LazyLanes(1)),
    ):
        assert_same(run_numbers(workload, 2), expected)


def test_no_gradients_nothing_moves(zoo: SimpleNamespace, swapping: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    with swapping.swapped(workload.model, STACK) as at_work:
        with torch.no_grad():
            workload.compute_loss()
            workload.model.eval()
            workload.compute_loss()
        assert at_work.engine.statistics().moves == 0


def test_300_steps_leave_nothing_behind(zoo: SimpleNamespace, swapping: SimpleNamespace) -> None:
    ours = (Moved, Handle, Kept, Copy, Step, StorageWeakRef)

    def living() -> int:
        gc.collect()
        return sum(isinstance(thing, (*ours, torch.Tensor)) for thing in gc.get_objects())

    workload = zoo.workload(lambda: zoo.Stack(blocks=2))
    calls = ["stem", "blocks.0", "blocks.1", "head"]
    with swapping.swapped(workload.model, calls, lanes_for(torch.device("cpu"))) as at_work:
        counts = []
        for step in range(300):
            workload.compute_loss().backward()
            assert at_work.arena.used_bytes == 0
            if step % 100 == 50:
                counts.append(living())
        assert counts[0] == counts[1] == counts[2]
        statistics = at_work.engine.statistics()
        assert statistics.steps == 300
        assert statistics.per_step(statistics.moves) == statistics.moves // 300


def test_lanes_of_a_real_kind_report_speed_and_stalls(
    zoo: SimpleNamespace, swapping: SimpleNamespace
) -> None:
    workload = zoo.workload(zoo.Stack)
    with swapping.swapped(workload.model, STACK) as at_work:
        workload.compute_loss().backward()
        statistics = at_work.engine.statistics()
    assert statistics.out_gb_per_s > 0 and statistics.in_gb_per_s > 0
    assert statistics.hidden_share == 0, "on the CPU every copy is waited for"
    assert statistics.host_bytes == 2**22


def test_names_need_compiled_code() -> None:
    moves = {0: CallMoves(frozenset({"mul"}), 1, 1, 1)}
    with pytest.raises(AssertionError):
        Swap(Recompute([], {}), moves, 1, Arena(512, False), lanes_for(torch.device("cpu")))


def test_lazy_conjugates_other_devices_and_subclasses_stay(swapping: SimpleNamespace) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.view_as_complex(x).conj()
            return F.dropout((y * y).imag, 0.0) * x[..., 0]

    model = nn.Sequential(Odd())
    x = torch.randn(8, 4, 2, requires_grad=True)
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    assert expected is not None
    with swapping.swapped(model, ["0"], swapping.LazyLanes()):
        model(x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, expected)
