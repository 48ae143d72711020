"""Swap everything a model saves, by copies at once or by copies that come as late as they may."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.ir.swap import Traffic
from memfit.runtime.calls import Engine, Route, Router, Wrap, routed
from memfit.runtime.compile.compiled import CompiledSegments
from memfit.runtime.recompute import Recompute
from memfit.runtime.swap.arena import Arena, Slot
from memfit.runtime.swap.engine import CallMoves, Swap
from memfit.runtime.swap.lanes import BACK, OUT, Copy, Lanes, lanes_for

CPU = torch.device("cpu")


@dataclass
class _Job:
    copy: Copy
    memory: StorageWeakRef  # device side, not kept alive
    view: torch.Tensor  # host side
    after: Copy | None


class LazyLanes:
    """Copies that run when they are waited for, or at random moments before.

    Like streams: those of a direction in order, the two directions in any order. Memory that is
    let go before its copy was waited for, and copies that read too early, are errors.
    """

    pinned = False
    device = CPU

    def __init__(self, seed: int | None = None) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._queues: tuple[list[_Job], list[_Job]] = ([], [])
        self._done: set[int] = set()
        self._copies = 0
        self._bytes = [0, 0]
        self._counts = [0, 0]
        self.log: list[tuple[str, Any]] = []
        self.errors: list[str] = []

    def copy_out(self, source: torch.Tensor, slot: Slot) -> Copy:
        slot.written = self._queue(OUT, source, slot.view, slot.after)
        return slot.written

    def copy_in(self, slot: Slot, target: torch.Tensor) -> Copy:
        assert slot.written is not None
        target.fill_(0xFF)  # whoever reads too early reads this
        return self._queue(BACK, target, slot.view, slot.written)

    def wait(self, copy: Copy) -> None:
        self.log.append(("wait out" if copy.direction == OUT else "wait back", copy.bytes))
        self._run_until(copy)

    def done(self, copy: Copy) -> bool:
        return copy.number in self._done

    def synchronize(self) -> None:
        for queue in self._queues:
            if queue:
                self._run_until(queue[-1].copy)

    def traffic(self) -> tuple[Traffic, Traffic]:
        self.synchronize()
        out, back = (Traffic(b, n) for b, n in zip(self._bytes, self._counts, strict=True))
        return out, back

    def reset_traffic(self) -> None:
        self._bytes, self._counts = [0, 0], [0, 0]

    def _queue(
        self, direction: int, memory: torch.Tensor, view: torch.Tensor, after: Copy | None
    ) -> Copy:
        self._copies += 1
        copy = Copy(direction, self._copies, memory.numel())
        reference = StorageWeakRef(memory.untyped_storage())
        self._queues[direction].append(_Job(copy, reference, view, after))
        self.log.append(("out" if direction == OUT else "back", copy.bytes))
        self._bytes[direction] += copy.bytes
        self._counts[direction] += 1
        while self._random is not None and self._random.random() < 0.5:
            some = self._queues[self._random.randrange(2)]
            if some:
                self._run_until(some[0].copy)
        return copy

    def _run_until(self, copy: Copy) -> None:
        while not self.done(copy):
            job = self._queues[copy.direction].pop(0)
            self._done.add(job.copy.number)
            if job.after is not None:
                self._run_until(job.after)
            storage = torch.UntypedStorage._new_with_weak_ptr(job.memory.cdata)
            if storage is None:
                self.errors.append(f"copy {job.copy} lost its device memory")
                continue
            memory = torch.empty(0, dtype=torch.uint8).set_(storage)
            if copy.direction == OUT:
                job.view.copy_(memory)
            else:
                memory.copy_(job.view)


@dataclass
class Swapped:
    """A model that swaps."""

    engine: Swap
    arena: Arena
    lanes: Any
    router: Router = field(repr=False)


def everything(num_calls: int, ahead: int = 1, smallest: int = 1) -> dict[int, CallMoves]:
    """All calls move all they can; it goes and comes `ahead` calls after and before its use."""
    return {
        i: CallMoves(None, smallest, min(i + ahead, num_calls), min(i + ahead, num_calls))
        for i in range(num_calls)
    }


@contextmanager
def swapped(
    model: torch.nn.Module,
    calls: Sequence[str],
    lanes: Lanes | None = None,
    *,
    moves: Mapping[int, CallMoves] | None = None,
    arena_bytes: int = 2**22,
    inner: Engine | None = None,
    code: Mapping[int, Wrap] | None = None,
    compiled: CompiledSegments | None = None,
    static: Sequence[torch.Tensor] = (),
    model_calls: int = 1,
) -> Iterator[Swapped]:
    """Swap what the named modules' calls save; at the end nothing is left over."""
    visits: dict[str, int] = {}
    numbered = []
    for name in calls:
        numbered.append((name, visits.get(name, 0)))
        visits[name] = visits.get(name, 0) + 1
    route = Route([(name, number, visits[name]) for name, number in numbered], model_calls)
    used = lanes_for(CPU) if lanes is None else lanes
    arena = Arena(arena_bytes, used.pinned)
    engine = Swap(
        Recompute([], {}) if inner is None else inner,
        everything(len(calls)) if moves is None else moves,
        len(calls),
        arena,
        used,
        [*model.parameters(), *model.buffers(), *static],
        compiled,
    )
    with routed(model, route, engine, code) as router:
        yield Swapped(engine, arena, used, router)
    engine.close()
    assert not getattr(used, "errors", [])
    assert arena.used_bytes == 0
    arena.close()


LANES: dict[str, Callable[[], Lanes]] = {
    "at once": lambda: lanes_for(CPU),
    "as late as possible": LazyLanes,
    "random 0": lambda: LazyLanes(0),
    "random 1": lambda: LazyLanes(1),
}


@pytest.fixture(params=LANES)
def lanes(request: pytest.FixtureRequest) -> Lanes:
    """Copies on the CPU, and stand-ins for copies that take their time."""
    return LANES[request.param]()


@pytest.fixture(scope="session")
def swapping() -> SimpleNamespace:
    """What the tests of the engine share."""
    return SimpleNamespace(
        everything=everything, swapped=swapped, LazyLanes=LazyLanes, Swapped=Swapped
    )
