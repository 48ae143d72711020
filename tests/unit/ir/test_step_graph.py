"""Which runs a step offers, and what a run keeps."""

from __future__ import annotations

from dataclasses import replace

from memfit.ir.step_graph import Block, Call, StepGraph


def _call(index: int, **changes: object) -> Call:
    call = Call(
        index=index,
        module=f"m{index}",
        number=0,
        visits=1,
        kind="Block",
        leaf=False,
        enter=index,
        stop=index,
        exit=index,
        need=20 - index,
        done=20 - index,
    )
    return replace(call, **changes)


def _graph(*calls: Call, blocks: tuple[Block, ...] = ()) -> StepGraph:
    return StepGraph(30, 9, 10, 25, {"parameters": 70, "batch": 5}, calls, blocks)


def test_runs_follow_chains() -> None:
    graph = _graph(_call(0), _call(1, chained=True), _call(2), _call(3, chained=True))
    assert graph.runs(4) == [(0, 0), (0, 1), (1, 1), (2, 2), (2, 3), (3, 3)]


def test_runs_are_no_longer_than_asked() -> None:
    graph = _graph(_call(0), *(_call(i, chained=True) for i in range(1, 5)))
    assert max(last - first + 1 for first, last in graph.runs(3)) == 3
    assert (0, 4) in graph.runs(5)


def test_a_single_layer_alone_is_no_run_but_two_are() -> None:
    graph = _graph(_call(0, leaf=True), _call(1, leaf=True, chained=True), _call(2, chained=True))
    assert graph.runs(3) == [(0, 1), (0, 2), (1, 2), (2, 2)]


def test_a_pinned_call_begins_no_run_but_may_sit_inside_one() -> None:
    graph = _graph(_call(0), _call(1, chained=True, pinned="why"), _call(2, chained=True))
    assert graph.runs(3) == [(0, 0), (0, 1), (0, 2), (2, 2)]


def test_a_run_keeps_arguments_that_it_does_not_make() -> None:
    graph = _graph(
        _call(0, args=(7, 8)),
        _call(1, args=(1, 8, 9), linked=(1,), chained=True),
    )
    assert graph.held_arguments(0, 0) == {7, 8}
    assert graph.held_arguments(0, 1) == {7, 8, 9}
    assert graph.held_arguments(1, 1) == {1, 8, 9}


def test_names_number_the_calls_of_one_module() -> None:
    assert _call(0).name == "m0"
    assert _call(1, number=2).name == "m1#2"


def test_fixed_bytes_count_all_gradients() -> None:
    blocks = (
        Block(0, 10, 11, 26, "gradients"),
        Block(1, 20, 12, 26, "gradients"),
        Block(2, 40, 2, 8, "activations"),
    )
    graph = _graph(_call(0), blocks=blocks)
    assert (graph.static_bytes, graph.gradient_bytes, graph.fixed_bytes) == (75, 30, 105)


def test_while_accumulating_gradients_stand_and_new_ones_pass() -> None:
    blocks = (Block(0, 10, 11, 26, "gradients"), Block(1, 40, 2, 8, "activations"))
    later = _graph(_call(0), blocks=blocks).accumulating()
    assert later.static == {"parameters": 70, "batch": 5, "gradients": 10}
    assert (later.blocks[0].category, later.blocks[0].death) == ("temporaries", 12)
    assert later.blocks[1] == blocks[1]
