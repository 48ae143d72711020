"""Saved tensors of compiled segments move, all of them or those with chosen names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memfit.ir.joint_graph import JointGraph
from memfit.runtime.compile.compiled import CompiledSegments
from memfit.runtime.recompute import Recompute
from memfit.runtime.swap.engine import CallMoves
from memfit.runtime.swap.lanes import Lanes

BLOCKS = [f"blocks.{i}" for i in range(3)]
N = len(BLOCKS)


@pytest.fixture(scope="module")
def segments() -> Iterator[CompiledSegments]:
    made = CompiledSegments("graph")
    yield made
    made.close()


def _code(segments: CompiledSegments, **plan: Any) -> dict[int, Any]:
    return {i: partial(segments.bind, **plan) for i in range(N)}


def _graph(zoo: SimpleNamespace, segments: CompiledSegments) -> JointGraph:
    model = zoo.workload(lambda: zoo.Stack(blocks=N)).model
    segments(model.blocks[0].forward, (torch.randn(4, 6, 16, requires_grad=True),), {})
    assert segments.last_key is not None
    return segments.graphs[segments.last_key]


def _saved(graph: JointGraph) -> list[str]:
    return [graph.nodes[i].name for i in graph.unplanned]


def test_all_that_compiled_calls_save(
    zoo: SimpleNamespace,
    swapping: SimpleNamespace,
    lanes: Lanes,
    segments: CompiledSegments,
    run_numbers: Callable[..., Any],
    assert_same: Callable[..., None],
) -> None:
    def build() -> Any:
        return zoo.workload(lambda: zoo.Stack(blocks=N))

    expected = run_numbers(build(), 3)
    workload = build()
    before = segments.compilations
    with swapping.swapped(workload.model, BLOCKS, lanes, code=_code(segments)) as at_work:
        assert_same(run_numbers(workload, 3), expected)
        statistics = at_work.engine.statistics()
    assert statistics.moves == statistics.retrievals > 3 * N
    assert segments.compilations <= before + 1, "hooks must not compile anything anew"


def test_only_named_nodes_move(
    zoo: SimpleNamespace,
    swapping: SimpleNamespace,
    lanes: Lanes,
    segments: CompiledSegments,
    run_numbers: Callable[..., Any],
    assert_same: Callable[..., None],
) -> None:
    def build() -> Any:
        return zoo.workload(lambda: zoo.Stack(blocks=N))

    graph = _graph(zoo, segments)
    large = [n for n in graph.nodes if n.name in _saved(graph) and n.op == "aten.addmm.default"]
    assert large
    chosen = large[0]
    expected = run_numbers(build(), 2)
    workload = build()
    moves = {
        i: CallMoves(frozenset({chosen.name}), 1, min(i + 1, N), min(i + 1, N)) for i in range(N)
    }
    code = _code(segments, key=graph.key, saved=_saved(graph))
    watched: list[str] = []
    with (
        segments.watched(lambda name, tensor: watched.append(name)),
        swapping.swapped(
            workload.model, BLOCKS, lanes, moves=moves, code=code, compiled=segments
        ) as at_work,
    ):
        assert_same(run_numbers(workload, 2), expected)
        statistics = at_work.engine.statistics()
    assert statistics.moves == statistics.retrievals == 2 * N
    assert statistics.moved_bytes == 2 * N * 4 * 6 * 64 * 4
    assert watched.count(chosen.name) == 2 * N, "a watch outside sees what it saw before"
    assert segments.watch is None


def test_the_input_of_a_compiled_call_that_is_recomputed_moves(
    zoo: SimpleNamespace,
    swapping: SimpleNamespace,
    lanes: Lanes,
    segments: CompiledSegments,
    run_numbers: Callable[..., Any],
    assert_same: Callable[..., None],
) -> None:
    def build() -> Any:
        return zoo.workload(lambda: zoo.Stack(blocks=N))

    expected = run_numbers(build(), 2)
    workload = build()
    modules = {i: workload.model.get_submodule(name) for i, name in enumerate(BLOCKS)}
    inner = Recompute([(0, 0), (1, 2)], modules, compiled=set(range(N)))
    with swapping.swapped(
        workload.model, BLOCKS, lanes, inner=inner, code=_code(segments)
    ) as at_work:
        assert_same(run_numbers(workload, 2), expected)
        statistics = at_work.engine.statistics()
    assert statistics.moves == statistics.retrievals == 2 * 2
    assert inner.replays == 2 * 2


def test_an_arena_too_small_for_a_compiled_call_leaves_what_it_saves_on_the_device(
    zoo: SimpleNamespace,
    swapping: SimpleNamespace,
    lanes: Lanes,
    segments: CompiledSegments,
    run_numbers: Callable[..., Any],
    assert_same: Callable[..., None],
) -> None:
    expected = run_numbers(zoo.workload(lambda: zoo.Stack(blocks=N)), 2)
    workload, code = zoo.workload(lambda: zoo.Stack(blocks=N)), _code(segments)
    with swapping.swapped(workload.model, BLOCKS, lanes, arena_bytes=2**14, code=code) as at_work:
        assert_same(run_numbers(workload, 2), expected)
        done = at_work.engine.statistics()
    assert done.moves > 0 and done.stayed > 0


def test_saved_memory_is_free_between_forward_and_backward(
    zoo: SimpleNamespace, swapping: SimpleNamespace, segments: CompiledSegments
) -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    graph = _graph(zoo, segments)
    workload = zoo.workload(lambda: zoo.Stack(blocks=N))
    parameters = {p.untyped_storage()._cdata for p in workload.model.parameters()}
    seen: list[StorageWeakRef] = []

    def watch(name: str, tensor: torch.Tensor) -> None:
        if name in _saved(graph) and tensor.untyped_storage()._cdata not in parameters:
            seen.append(StorageWeakRef(tensor.untyped_storage()))

    lanes = swapping.LazyLanes()
    code = _code(segments, key=graph.key, saved=_saved(graph))
    with (
        segments.watched(watch),
        swapping.swapped(workload.model, BLOCKS, lanes, code=code) as at_work,
    ):
        loss = workload.compute_loss()
        alive = sum(not reference.expired() for reference in seen)
        assert len(seen) > 4 * N and alive == 0
        loss.backward()
        assert at_work.arena.used_bytes == 0


class Ending(nn.Module):
    """Returns what it saves, through a view: torch hands it out with a version of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(x))).view(x.shape[0], -1, 16)
        y.relu_()
        return y


class Endings(nn.Module):
    """Blocks that save what they return, which the next one saves again."""

    def __init__(self, change: bool = False) -> None:
        super().__init__()
        self.change = change
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Ending() for _ in range(N))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            if self.change:
                with torch.no_grad():
                    x.mul_(2)
        return x


def _all_saved(segments: CompiledSegments) -> tuple[dict[int, CallMoves], dict[int, Any]]:
    """Calls of Endings move all that they save, by name."""
    x = torch.randn(4, 6, 16, requires_grad=True)
    segments(Endings().blocks[0].forward, (x,), {})
    assert segments.last_key is not None
    graph = segments.graphs[segments.last_key]
    names = frozenset(_saved(graph))
    moves = {i: CallMoves(names, 1, i + 1, i + 1) for i in range(N)}
    return moves, _code(segments, key=graph.key, saved=_saved(graph))


def test_a_result_that_is_saved_again_moves_once(
    zoo: SimpleNamespace,
    swapping: SimpleNamespace,
    lanes: Lanes,
    segments: CompiledSegments,
    run_numbers: Callable[..., Any],
    assert_same: Callable[..., None],
) -> None:
    expected = run_numbers(zoo.workload(Endings), 2)
    workload = zoo.workload(Endings)
    moves, code = _all_saved(segments)
    with swapping.swapped(
        workload.model, BLOCKS, lanes, moves=moves, code=code, compiled=segments
    ) as at_work:
        assert_same(run_numbers(workload, 2), expected)
        statistics = at_work.engine.statistics()
    # what enters the first, and the tanh and the relu of each
    assert statistics.moves == statistics.retrievals == 2 * (1 + 2 * N)


def test_a_result_that_was_changed_moves_again(
    zoo: SimpleNamespace, swapping: SimpleNamespace, lanes: Lanes, segments: CompiledSegments
) -> None:
    def change() -> Any:
        return zoo.workload(lambda: Endings(change=True))

    workload = change()
    moves, code = _all_saved(segments)
    with swapping.swapped(workload.model, BLOCKS, code=code, moves={}):
        kept = workload.compute_loss()
    workload = change()
    with swapping.swapped(
        workload.model, BLOCKS, lanes, moves=moves, code=code, compiled=segments
    ) as at_work:
        loss = workload.compute_loss()
        assert torch.equal(loss, kept)
        assert at_work.engine.statistics().moves == 1 + 2 * N + N - 1
        loss.backward()


def test_a_watch_of_one_thread_sees_nothing_of_another(
    zoo: SimpleNamespace, segments: CompiledSegments
) -> None:
    block = zoo.workload(lambda: zoo.Stack(blocks=N)).model.blocks[0]
    x = torch.randn(4, 6, 16, requires_grad=True)
    here: list[str] = []
    everywhere: list[str] = []
    keys: list[str | None] = []

    def elsewhere() -> None:
        keys.append(segments.last_key)
        segments(block.forward, (x,), {})
        keys.append(segments.last_key)

    def in_thread() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    segments(block.forward, (x,), {})
    with segments.watched_here(lambda name, tensor: here.append(name)):
        in_thread()
        assert not here
        segments(block.forward, (x,), {})
        assert here
    assert keys == [None, segments.last_key]
    with (
        segments.watched(lambda name, tensor: everywhere.append(name)),
        segments.watched_here(lambda name, tensor: here.append(name)),
    ):
        here.clear()
        in_thread()
        assert everywhere and not here
        everywhere.clear()
        segments(block.forward, (x,), {})
        assert here == everywhere
    assert segments.watch is None


@pytest.mark.slow
def test_around_fused_code(
    zoo: SimpleNamespace,
    swapping: SimpleNamespace,
    lanes: Lanes,
    run_numbers: Any,
    assert_same: Any,
) -> None:
    segments = CompiledSegments("inductor")
    try:

        def build() -> Any:
            return zoo.workload(lambda: nn.Sequential(zoo.Stack(blocks=N, dropout=0.0)))

        calls = [f"0.{name}" for name in BLOCKS]
        plain, workload = build(), build()
        with swapping.swapped(plain.model, calls, moves={}, code=_code(segments)):
            expected = run_numbers(plain, 2)
        with swapping.swapped(workload.model, calls, lanes, code=_code(segments)) as at_work:
            assert_same(run_numbers(workload, 2), expected)
            assert at_work.engine.statistics().retrievals > 0
    finally:
        segments.close()
