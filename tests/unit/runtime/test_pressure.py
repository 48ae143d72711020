"""The safety valve: what moves, when, and that the numbers do not change."""

from __future__ import annotations

import gc
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit.errors import HostMemoryError, UsageError
from memfit.ir.swap import Traffic
from memfit.runtime.pressure import host_store, saved_tensors
from memfit.runtime.pressure.gauge import CountingGauge, Marks, gauge_for, marks_for
from memfit.runtime.pressure.saved import Saved
from memfit.runtime.pressure.valve import Valve
from memfit.runtime.swap import mover
from memfit.runtime.swap.arena import Slot
from memfit.runtime.swap.lanes import BACK, OUT, Copy

FLOATS = 1000
UNIT = 4 * FLOATS  # bytes of the tensors that `Chain` saves


def valve(threshold: float = 0.0, **options: Any) -> Valve:
    """A valve for the CPU that moves small tensors, too."""
    defaults: dict[str, Any] = {"min_tensor_bytes": 64, "device": "cpu", "host_budget": "1GiB"}
    return memfit.pressure(threshold, **(defaults | options))


def host_bytes(of: Valve) -> int:
    """Host memory that a valve holds."""
    return of._saved_tensors._host.capacity_bytes


class Chain:
    """A graph that saves one tensor of UNIT bytes with every `grow`, filled with its number."""

    def __init__(self) -> None:
        self.weight = torch.ones((), requires_grad=True)
        self.total = torch.zeros(())
        self.numbers = 0

    def grow(self, times: int = 1) -> None:
        for _ in range(times):
            self.numbers += 1
            tensor = torch.full((FLOATS,), float(self.numbers))
            self.total = self.total + (self.weight * tensor)[0]
            del tensor

    def check(self) -> None:
        """The gradient is the sum of the numbers; the graph is gone afterwards."""
        self.total.backward()
        assert self.weight.grad == sum(range(1, self.numbers + 1))


class LateLanes:
    """Lanes that copy as late as they may, as a GPU far behind its host does.

    A copy is made when the computation waits for it or for a later one of its direction.
    """

    pinned = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = 0
        self._under_way: tuple[deque[Any], deque[Any]] = (deque(), deque())
        self.order: tuple[list[float], list[float]] = ([], [])
        self.late: tuple[list[int], list[int]] = ([], [])  # copies under way at each wait
        self._bytes = [0, 0]

    def copy_out(self, source: torch.Tensor, slot: Slot) -> Copy:
        if slot.after is not None:
            self.wait(slot.after)
        slot.written = self._start(OUT, source, slot)
        return slot.written

    def copy_in(self, slot: Slot, target: torch.Tensor) -> Copy:
        self.wait(slot.written)
        target.fill_(7)
        return self._start(BACK, target, slot)

    def wait(self, copy: Copy) -> None:
        queue = self._under_way[copy.direction]
        self.late[copy.direction].append(len(queue))
        while queue and queue[0][0].number <= copy.number:
            started, reference, slot = queue.popleft()
            storage = reference()
            assert storage is not None, "memory was let go while it was copied"
            device = torch.empty(0, dtype=torch.uint8).set_(storage)
            source, target = (device, slot) if started.direction == OUT else (slot, device)
            target.copy_(source)
            started.end = None
            self.order[started.direction].append(source.view(torch.float32)[0].item())
        assert copy.end is None

    def done(self, copy: Copy) -> bool:
        return copy.end is None

    def in_flight(self) -> int:
        return sum(len(queue) for queue in self._under_way)

    def synchronize(self) -> None:
        for queue in self._under_way:
            if queue:
                self.wait(queue[-1][0])

    def traffic(self) -> tuple[Traffic, Traffic]:
        return Traffic(self._bytes[OUT]), Traffic(self._bytes[BACK])

    def reset_traffic(self) -> None:
        raise AssertionError("a valve counts from its beginning")

    def _start(self, direction: int, device: torch.Tensor, slot: Slot) -> Copy:
        self._copies += 1
        self._bytes[direction] += device.numel()
        copy = Copy(direction, self._copies, device.numel(), end=object())
        self._under_way[direction].append((copy, ref(device.untyped_storage()), slot.view))
        return copy


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[LateLanes]:
    """Every valve of the test copies late; its lanes."""
    made: list[LateLanes] = []

    def lanes_for(device: torch.device) -> LateLanes:
        made.append(LateLanes(device))
        return made[-1]

    monkeypatch.setattr(host_store, "lanes_for", lanes_for)
    return made


@pytest.fixture(autouse=True)
def nothing_left(frozen_garbage: None) -> Iterator[None]:
    yield
    gc.collect()
    left = [o for o in gc.get_objects() if isinstance(o, Saved)]
    assert not left, f"{len(left)} saved tensors were left behind"


MODELS = [
    ("Stack", "sequences"),
    ("TiedStack", "sequences"),
    ("ConvNet", "images"),
    ("PreActivationNet", "images"),
    ("AttentionNet", "sequences"),
    ("SkipNet", "sequences"),
    ("Reused", "sequences"),
]


@pytest.mark.parametrize(("model", "batch"), MODELS)
def test_everything_moves_and_the_numbers_stay(
    zoo: SimpleNamespace,
    run_numbers: Callable[..., Any],
    assert_same: Callable[..., None],
    model: str,
    batch: str,
) -> None:
    plain, swapped = (zoo.workload(getattr(zoo, model), getattr(zoo, batch)) for _ in "ab")
    with valve() as forced:
        actual = run_numbers(swapped, 2)
    assert_same(actual, run_numbers(plain, 2))
    done = forced.statistics
    assert done.swaps == done.retrievals > 10
    assert done.moved_bytes == done.restored_bytes > 0
    assert done.waited_s > 0
    assert host_bytes(forced) == 0 < done.host_highest_bytes


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5, 0.9])
@pytest.mark.parametrize(("model", "batch"), MODELS[:4])
def test_late_copies_are_waited_for(
    late: list[LateLanes],
    zoo: SimpleNamespace,
    run_numbers: Callable[..., Any],
    assert_same: Callable[..., None],
    model: str,
    batch: str,
    threshold: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So small a device has no room for more than this and for copies under way, too.
    monkeypatch.setattr("memfit.runtime.pressure.gauge._ROOM", 2)
    plain, swapped = (zoo.workload(getattr(zoo, model), getattr(zoo, batch)) for _ in "ab")
    with valve(threshold, capacity="48KiB") as busy:
        actual = run_numbers(swapped, 3)
    assert_same(actual, run_numbers(plain, 3))
    assert busy.statistics.swaps == busy.statistics.retrievals > 0
    assert max(late[0].late[OUT]) > 1, "copies run beside the computation"
    assert max(late[0].late[BACK]) > 1


def test_autocast(zoo: SimpleNamespace, assert_same: Callable[..., None]) -> None:
    def gradients(open_: bool) -> Any:
        workload = zoo.workload(zoo.Stack)
        torch.manual_seed(3)
        with valve() if open_ else torch.enable_grad() as forced:
            with torch.autocast("cpu", torch.bfloat16):
                loss = workload.compute_loss()
            loss.backward()
        if open_:
            assert forced.statistics.swaps > 0
        return loss.detach(), [p.grad for p in workload.model.parameters()]

    assert_same(gradients(True), gradients(False))


def test_below_the_threshold_nothing_is_set_up(
    zoo: SimpleNamespace, run_numbers: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("no arena, no lanes, no look at owners")

    monkeypatch.setattr(host_store, "lanes_for", refuse)
    monkeypatch.setattr(host_store, "Arena", refuse)
    monkeypatch.setattr(saved_tensors, "is_sole_owner", refuse)
    with valve(0.99, capacity="1GiB") as idle:
        run_numbers(zoo.workload(zoo.Stack), 3)
    done = idle.statistics
    assert (done.swaps, done.retrievals, done.moved_bytes, done.host_highest_bytes) == (0, 0, 0, 0)
    assert done.highest_bytes > 10_000


def test_memory_in_use_is_read_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    class Slow(CountingGauge):
        look_every = 10 * UNIT

        def allocated(self) -> int:
            reads.append(1)
            return super().allocated()

    monkeypatch.setattr(saved_tensors, "gauge_for", lambda device, capacity: Slow())
    with valve(0.99, capacity="1GiB"):
        chain = Chain()
        chain.grow(100)
        assert len(reads) == 10
        chain.check()
        assert len(reads) == 20


def test_the_longest_idle_move_first_and_only_until_the_low_mark(moved: list[float]) -> None:
    with valve(0.8, capacity=10 * UNIT, release_at=0.5) as busy:
        chain = Chain()
        chain.grow(8)
        assert not moved, "the threshold is not passed"
        chain.grow()
        assert moved == [1, 2, 3, 4]
        chain.grow(3)
        assert len(moved) == 4, "no more until the threshold is passed again"
        chain.grow()
        assert moved == [1, 2, 3, 4, 5, 6, 7, 8]
        assert busy.statistics.swaps == 8
        assert busy.statistics.highest_bytes == 9 * UNIT
        chain.check()
        assert busy.statistics.retrievals == 8


def test_swaps_stop_when_the_pressure_ends(moved: list[float]) -> None:
    with valve(0.8, capacity=10 * UNIT) as busy:
        for _ in range(2):
            chain = Chain()
            chain.grow(20)
            chain.check()
        under_pressure = len(moved)
        assert under_pressure == busy.statistics.swaps == busy.statistics.retrievals > 20
        for _ in range(5):
            chain = Chain()
            chain.grow(7)
            chain.check()
        assert len(moved) == under_pressure


def test_memory_stays_below_the_capacity(late: list[LateLanes]) -> None:
    with valve(0.6, capacity=10 * UNIT) as busy:
        chain = Chain()
        for _ in range(60):
            chain.grow()
            assert busy._saved_tensors._gauge.allocated() <= 8 * UNIT
        chain.check()
        assert busy.statistics.highest_bytes <= 9 * UNIT
    assert late[0].order[OUT] == [float(n) for n in range(1, len(late[0].order[OUT]) + 1)]


def test_the_backward_has_the_next_tensors_on_their_way(late: list[LateLanes]) -> None:
    with valve() as forced:
        chain = Chain()
        chain.grow(10)
        away = forced.statistics.swaps
        chain.check()
        assert forced.statistics.retrievals == away
    back = late[0].order[BACK]
    assert back == sorted(back, reverse=True), "in the reverse order of saving"
    assert late[0].late[BACK][:-1] == [2] * (away - 1), "each with the next one behind it"


def test_copies_under_way_count_as_gone_and_are_waited_for_when_room_is_short(
    late: list[LateLanes],
) -> None:
    with valve(0.6, release_at=0.5, capacity=10 * UNIT) as busy:
        chain = Chain()
        seen = []
        for _ in range(11):
            chain.grow()
            done = busy.statistics
            seen.append((done.moved_bytes // UNIT, done.swaps))
        # At 7 the mark is passed; with two on their way 5 will be left. 7 is the ceiling.
        assert seen[5:] == [(0, 0), (2, 0), (2, 1), (4, 2), (4, 3), (6, 4)]
        chain.check()
        assert busy._saved_tensors._leaving_bytes == 0


def test_a_tensor_that_is_saved_again_is_not_idle(moved: list[float]) -> None:
    weight = torch.ones((), requires_grad=True)
    with valve(0.6, release_at=0.2, capacity=10 * UNIT):
        again = torch.full((FLOATS,), 99.0)
        loss = (weight * again)[0]
        chain = Chain()
        chain.grow(4)
        loss = loss + (weight * again)[0]
        del again
        chain.grow(2)
        assert moved == [1, 2, 3, 4, 99]
        chain.check()
        loss.backward()
    assert weight.grad == 2 * 99


def test_a_tensor_saved_twice_and_its_weight_move_one_tensor(moved: list[float]) -> None:
    weight = nn.Parameter(torch.randn(FLOATS, FLOATS))
    small = torch.ones(FLOATS, requires_grad=True)

    def loss() -> torch.Tensor:
        hidden = small * 2  # saves a number
        return (F.linear(hidden, weight) + hidden * hidden)[0]  # saves hidden three times, weight

    loss().backward()
    expected, weight.grad = weight.grad, None
    with valve() as forced:
        result = loss()
        assert forced.statistics.swaps == 0, "the next tensor that is saved lets it go"
        Chain().grow()
        assert moved == [2.0]
        result.backward()
        assert forced.statistics.swaps == forced.statistics.retrievals == 1
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=0)


def test_buffers_and_the_batch_stay(moved: list[float]) -> None:
    buffer, batch = torch.full((FLOATS,), 5.0), torch.full((FLOATS,), 6.0)
    weight = torch.ones((), requires_grad=True)
    with valve():
        loss = (weight * buffer).sum() + (weight * batch).sum()
        Chain().grow(3)
        loss.backward()
    assert 5.0 not in moved and 6.0 not in moved and moved


def test_views_of_one_storage_move_once_and_come_back_as_they_were(moved: list[float]) -> None:
    weight = torch.arange(1.0, 25).reshape(4, 6).requires_grad_()

    def loss() -> torch.Tensor:
        base = weight * 3
        turned, left, right = base.t(), *base.chunk(2, dim=1)
        mixed = (turned[2:] * turned[1:-1]).sum() + (left * right).sum() + (base[1] * base[2]).sum()
        return mixed + base.view(torch.int32).view(torch.float32).detach().mul(weight).sum()

    loss().backward()
    expected, weight.grad = weight.grad, None
    with valve() as forced:
        result = loss()
        Chain().grow()
        assert moved == [3.0]
        result.backward()
    assert forced.statistics.swaps == forced.statistics.retrievals == 1
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=0)


class Several(torch.autograd.Function):
    """Saves many tensors that need no gradient, as a compiled segment does."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*(torch.full((FLOATS,), float(n)) for n in range(6)))
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return sum(tensor[0] for tensor in ctx.saved_tensors)  # type: ignore[return-value]


def test_what_a_node_uses_does_not_leave_again(late: list[LateLanes]) -> None:
    weight = torch.ones((), requires_grad=True)
    with valve(0.1, capacity=10 * UNIT) as busy:
        loss = Several.apply(weight)
        Chain().grow()
        loss.backward()
    assert weight.grad == 15
    assert busy.statistics.swaps == busy.statistics.retrievals == 6


def test_a_saved_tensor_changed_in_place_is_an_error_as_without_the_valve() -> None:
    weight = torch.ones(FLOATS, requires_grad=True)
    with valve(0.5, capacity="1GiB"):
        hidden = weight * 2
        loss = hidden.square().sum()
        hidden.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del hidden, loss
        bias = torch.ones(1, requires_grad=True)
        loss = (weight * bias).sum()
        with torch.no_grad():
            bias.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_one_changed_in_place_before_it_moved_is_an_error_too() -> None:
    weight = torch.ones(FLOATS, requires_grad=True)
    with valve() as forced:
        hidden = weight * 2
        loss = hidden.square().sum()
        hidden.add_(1)
        del hidden
        Chain().grow()
        assert forced.statistics.swaps == 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_two_backwards_and_a_double_backward(late: list[LateLanes]) -> None:
    def grow(open_: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight = torch.randn(20, 20, requires_grad=True)
        loss = weight
        for _ in range(6):
            loss = torch.tanh(loss @ weight)
        loss = loss.square().sum()
        found = [torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(3)]
        (first,) = torch.autograd.grad(loss, weight, create_graph=True)
        return [*found, first.detach(), *torch.autograd.grad(first.square().sum(), weight)]

    expected = grow(False)
    for options in ({}, {"threshold": 0.5, "capacity": 10_000}):
        with valve(**options) as busy:
            actual = grow(True)
        assert busy.statistics.swaps > 0
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert host_bytes(busy) == 0


class Broken(torch.autograd.Function):
    """Fails in the forward or in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str) -> torch.Tensor:
        if where == "forward":
            raise ValueError("mine")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ValueError("mine")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("around", ["the step", "the loop"])
def test_an_exception_in_the_middle_releases_everything(
    late: list[LateLanes], where: str, around: str
) -> None:
    forced = valve()

    def fail() -> None:
        chain = Chain()
        chain.grow(5)
        chain.total = Broken.apply(chain.total, where)
        chain.grow(5)
        chain.total.backward()

    if around == "the step":
        with pytest.raises(ValueError, match="mine"), forced:
            fail()
        assert host_bytes(forced) == 0
    with forced:
        if around == "the loop":
            with pytest.raises(ValueError, match="mine"):
                fail()
            assert forced._saved_tensors._gauge.allocated() == 0
            assert forced._saved_tensors._leaving_bytes == 0
            assert forced._saved_tensors._host.used_bytes == 0 < host_bytes(forced)
        chain = Chain()
        chain.grow(5)
        chain.check()
    assert host_bytes(forced) == 0


def test_a_graph_that_outlives_the_block_keeps_what_it_needs(late: list[LateLanes]) -> None:
    chain, dropped = Chain(), Chain()
    with valve() as forced:
        chain.grow(6)
        dropped.grow(6)
    assert forced.statistics.swaps > 0
    assert host_bytes(forced) > 0
    chain.check()
    assert host_bytes(forced) > 0
    del dropped
    assert host_bytes(forced) == 0


def test_a_valve_is_used_again(late: list[LateLanes]) -> None:
    forced = valve()
    swaps = []
    kept = Chain()
    for _ in range(3):
        with forced:
            kept.grow(2)
            chain = Chain()
            chain.grow(5)
            chain.check()
        swaps.append(forced.statistics.swaps)
    assert 0 < swaps[0] < swaps[1] < swaps[2]
    kept.check()
    assert host_bytes(forced) == 0


def test_nested_valves_are_refused() -> None:
    outer, inner = valve(), valve()
    with outer:
        with pytest.raises(UsageError, match="this valve is at work here"):
            outer.__enter__()
        with pytest.raises(UsageError, match=r"another valve is at work here[^?]*\nhint: "), inner:
            pass
        chain = Chain()
        chain.grow(5)
        chain.check()
    with inner:
        pass
    assert outer.statistics.swaps > 0


def _in_thread(work: Callable[[], Any]) -> list[BaseException]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors


def test_a_second_thread_is_refused() -> None:
    forced = valve()
    with forced:
        (entering,) = _in_thread(forced.__enter__)
        (leaving,) = _in_thread(lambda: forced.__exit__(None, None, None))
        chain = Chain()
        chain.grow(5)
        assert not _in_thread(chain.check), "a backward may run anywhere"
    assert isinstance(entering, UsageError) and "in another thread" in entering.message
    assert isinstance(leaving, UsageError) and leaving.hint


def test_what_the_host_budget_has_no_room_for_stays_on_the_device(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING), valve(host_budget=3 * UNIT) as forced:
        for _ in range(2):
            chain = Chain()
            chain.grow(10)
            assert forced.statistics.swaps % 2 == 0
            chain.check()
    assert forced.statistics.swaps == forced.statistics.retrievals == 4
    assert forced.statistics.host_highest_bytes <= 3 * UNIT
    assert forced.refusals > 0
    (record,) = caplog.records
    assert "host budget of 11.72 KiB" in record.getMessage()
    assert "memfit.pressure(host_budget=" in record.getMessage()
    with valve(host_budget=11 * UNIT) as enough:
        chain = Chain()
        chain.grow(10)
        chain.check()
    assert enough.refusals == 0


def test_a_valve_without_host_memory_says_so_once_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING), valve(0.5, capacity=10 * UNIT, host_budget=1) as stuck:
        for _ in range(3):
            chain = Chain()
            chain.grow(20)
            chain.check()
    assert stuck.statistics.swaps == 0
    (record,) = caplog.records
    assert "training goes on" in record.getMessage() and "host_budget" in record.getMessage()


def test_host_memory_the_system_refuses_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def refuse(self: Any, size: int) -> None:
        asked.append(size)
        raise HostMemoryError("the system says no", hint="free some")

    monkeypatch.setattr(host_store.Arena, "grow", refuse)
    with valve(0.5, capacity=10 * UNIT) as stuck:
        chain = Chain()
        chain.grow(30)
        chain.check()
    assert (len(asked), stuck.statistics.swaps) == (1, 0)
    assert "the system says no" in caplog.text


def test_copies_in_flight_are_counted_without_waiting(late: list[LateLanes]) -> None:
    with valve(0.5, capacity=20 * UNIT) as busy:
        assert busy.copies_in_flight == 0
        chain = Chain()
        chain.grow(12)
        assert busy.copies_in_flight == late[0].in_flight() > 0
        chain.check()
    late[0].synchronize()
    assert busy.copies_in_flight == 0


def test_300_steps_are_flat() -> None:
    seen = []
    with valve(0.5, capacity=20 * UNIT) as busy:
        for _ in range(300):
            chain = Chain()
            chain.grow(30)
            chain.check()
            inner = busy._saved_tensors
            seen.append((host_bytes(busy), inner._gauge.allocated(), len(inner._away)))
            assert len(inner._here) <= 2 * saved_tensors._TIDY_AT
            assert not inner._leaving and not inner._ahead and not inner._gone
    assert seen[1:] == seen[:-1]
    assert busy.statistics.host_highest_bytes < 30 * UNIT * 1.2
    assert busy.statistics.swaps == busy.statistics.retrievals > 300 * 10


def test_tensors_of_other_kinds_pass_through() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    index = torch.tensor([[0, 3], [1, 2]])
    sparse = torch.sparse_coo_tensor(index, torch.ones(2), (8, 8), check_invariants=True)

    def loss() -> torch.Tensor:
        wide = torch.complex(weight * 2, weight * 3)
        products = (wide.conj() * wide).abs().sum() + (wide.conj().imag * weight).sum()
        return products + torch.sparse.mm(sparse, weight * 2).sum()

    loss().backward()
    expected, weight.grad = weight.grad, None
    with valve(min_tensor_bytes=1) as forced:
        result = loss()
        Chain().grow(2)
        result.backward()
    assert forced.statistics.swaps > 0
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=0)


def test_room_is_left_for_the_largest_tensors() -> None:
    marks = Marks(high=80, low=70, capacity=100, always=False)
    assert [marks.ceiling(largest) for largest in (0, 5, 6, 40)] == [90, 85, 82, 70]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 1.1}, "threshold is 1.1"),
        ({"threshold": -0.1}, "threshold is -0.1"),
        ({"threshold": float("nan")}, "threshold is nan"),
        ({"threshold": True}, "threshold is True"),
        ({"threshold": "80%"}, "threshold is '80%'"),
        ({"release_at": 0.9}, "release_at is 0.9"),
        ({"capacity": "much"}, "not a number of bytes"),
        ({"capacity": 0}, "capacity is 0"),
        ({"host_budget": -1}, "host_budget is -1"),
        ({"min_tensor_bytes": -1}, "min_tensor_bytes is -1, below 0"),
        ({"device": "mps"}, "devices of type 'mps'"),
        ({"device": "gpu"}, "'gpu' names no device"),
        ({"capacity": None}, "on a cpu device"),
        ({"device": "cuda:99"}, "device is 'cuda:99', and there "),
    ],
)
def test_bad_input_is_refused_with_a_hint(options: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"threshold": 0.8, "capacity": "1GiB", "device": "cpu"}
    with pytest.raises(UsageError, match=message) as caught:
        memfit.pressure(**(good | options))
    assert caught.value.hint


def test_tensors_of_any_size_were_refused_as_a_limit() -> None:
    """A plan's default, and the hint was 1 GiB."""
    weight = torch.ones((), requires_grad=True)
    with valve(min_tensor_bytes=0) as forced:
        empty = (weight * torch.ones(0)).sum()  # is no reason to stop either
        total = weight * 1
        for number in range(8):
            total = (total + number).sin()
        (total + empty).backward()
    assert forced.statistics.swaps > 2


def test_a_cpu_with_a_number_moved_nothing(moved: list[float]) -> None:
    chain = Chain()
    with valve(device="cpu:0") as under:
        chain.grow(3)
    assert moved == [1, 2] and under.statistics.swaps == 2
    chain.check()


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="there is no CUDA device here") as caught:
        memfit.pressure(device="cuda")
    assert caught.value.hint and 'device="cpu"' in caught.value.hint
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="there are 2 CUDA devices here") as caught:
        memfit.pressure(device="cuda:2")
    assert caught.value.hint and "cpu" not in caught.value.hint
    memfit.pressure(device="cuda:1")


def test_memory_that_runs_out_in_the_backward_makes_everything_else_leave(
    late: list[LateLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, refused = torch.UntypedStorage, []

    def short(size: int, device: torch.device) -> torch.UntypedStorage:
        if busy._saved_tensors._gauge.allocated() > 3 * UNIT:
            refused.append(size)
            raise torch.OutOfMemoryError("none left")
        return allocate(size, device=device)

    with valve(0.9, release_at=0.3, capacity=10 * UNIT) as busy:
        chain = Chain()
        chain.grow(12)
        monkeypatch.setattr(mover.torch, "UntypedStorage", short)
        chain.check()
    assert refused
    assert busy.statistics.swaps == busy.statistics.retrievals > 0


def test_cuda_reads_what_the_process_may_take_and_has_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda", 0)
    numbers = {"allocated_bytes": {"all": {"current": 123}, "small_pool": {"current": 3}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: numbers)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    for share, capacity in ((1.0, 900), (0.5, 500)):
        monkeypatch.setattr(
            torch.cuda, "get_per_process_memory_fraction", lambda device, share=share: share
        )
        marks = marks_for(device, 0.8, 0.7, None)
        assert (marks.capacity, marks.high) == (capacity, int(0.8 * capacity))
    assert marks_for(device, 0.5, 0.4, 2000).capacity == 2000
    gauge = gauge_for(device, 2000)
    assert (gauge.allocated(), gauge.look_every, gauge.counts) == (123, 10, False)
