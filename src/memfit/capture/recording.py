"""Two recorded runs that together show every block of a step, in little memory.

The forward run drops what is saved, so each block dies when the running code lets go of it. The
step run recomputes every segment it can, so it fits wherever the tightest of simple plans fits; its
marks say when each saved tensor is wanted and let go in backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.capture.captured import Captured
from memfit.capture.discover import dropped_saved_tensors
from memfit.capture.last_pass import mark_pass
from memfit.measure.allocations import Event, mark, record
from memfit.measure.memory import storages_of
from memfit.measure.step import explained_errors, run_step
from memfit.runtime.calls import Forward, routed
from memfit.runtime.compile.compiled import CompiledSegments
from memfit.runtime.random_state import RandomState
from memfit.runtime.recompute import Recompute
from memfit.workload import Workload

_PHASE_MARKS = {"backward": "forward_end", "optimizer": "backward_end", "end": "end"}


def record_forward(workload: Workload, captured: Captured) -> list[Event]:
    """Record one forward in which nothing saved for backward is kept.

    It leaves the random numbers as they were: a step's sizes may hang on them.
    """
    engine = Marking(None, captured.keys)

    def pack(tensor: torch.Tensor) -> None:
        mark(f"pack {engine.current} {_address(tensor)}")

    def forward() -> None:
        with dropped_saved_tensors(pack):
            loss = workload.compute_loss()
        mark("forward_end")
        del loss

    with (
        routed(workload.model, captured.route, engine, captured.code),
        watched(captured.compiled, engine),
        explained_errors(workload),
        RandomState.of([workload.device]).replayed(),
    ):
        return record(forward, workload.device)


def record_step(workload: Workload, captured: Captured, accumulate: int = 1) -> list[Event]:
    """Record one whole step with every segment that can be recomputed."""
    engine = Marking(recompute_all(workload, captured, _Marks()), captured.keys)

    def pack(tensor: torch.Tensor) -> _Held:
        return _Held(engine.current, tensor)

    def unpack(held: _Held) -> torch.Tensor:
        mark(f"unpack {held.call}")
        return held.tensor

    def phase(name: str) -> None:
        if name == "forward":
            mark_pass(workload)
        else:
            mark(_PHASE_MARKS[name])

    def step() -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            run_step(workload, accumulate=accumulate, phase=phase)

    with (
        routed(workload.model, captured.route, engine, captured.code),
        watched(captured.compiled, engine, names=False),
        explained_errors(workload),
    ):
        return record(step, workload.device)


def recompute_all(
    workload: Workload,
    captured: Captured,
    observer: Any = None,
    *,
    trim: bool = False,
    every: int = 1,
) -> Recompute:
    """The engine that recomputes every segment worth it (or every n-th of them), each by itself."""
    runs = [(i, i) for i in captured.recomputed_alone()[::every]]
    modules = captured.modules(workload.model)
    return Recompute(runs, modules, mutated(captured), observer, trim, captured.keys)


def mutated(captured: Captured) -> dict[int, tuple[str, ...]]:
    """Buffers that each call changes, beside running statistics."""
    found = enumerate(captured.segments)
    return {i: s.visit.mutated_buffers for i, s in found if s.visit.mutated_buffers}


@contextmanager
def watched(
    compiled: CompiledSegments | None, engine: Marking, *, names: bool = True
) -> Iterator[None]:
    """Mark where joint graphs' backwards return; and what goes into and comes out of forwards."""

    def watch(node: str, tensor: torch.Tensor) -> None:
        mark(f"node {engine.current} {_address(tensor)} {node}")

    def returned() -> None:
        mark(f"backward_end {engine.backward}")

    shown = watch if names else None
    with nullcontext() if compiled is None else compiled.watched(shown, returned):
        yield


class Marking:
    """An engine that marks each call and its arguments, around another engine."""

    def __init__(self, inner: Recompute | None, captured: Container[int]) -> None:
        self.inner, self.captured = inner, captured
        self.current = self.backward = -1

    @property
    def replaying(self) -> bool:
        return self.inner is not None and self.inner.replaying

    def begin(self) -> None:
        self.current = -1
        if self.inner is not None:
            self.inner.begin()

    def end(self) -> None:
        mark("model_end")

    def __call__(self, index: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                mark(f"arg {index} {_address(leaf)}")

        def marked(*args: Any, **kwargs: Any) -> Any:
            if self.replaying:
                return forward(*args, **kwargs)
            mark(f"enter {index}")
            self.current = index
            try:
                return forward(*args, **kwargs)
            finally:
                self.current = -1

        output = (
            marked(*args, **kwargs)
            if self.inner is None
            else self.inner(index, marked, args, kwargs)
        )
        mark(f"exit {index}")
        if index in self.captured:
            self._mark_backward(index, output)
        return output

    def _mark_backward(self, index: int, output: Any) -> None:
        """Mark when the backward of a captured call begins; its code tells when it has returned."""

        def begins(gradients: Any) -> None:
            self.backward = index
            mark(f"backward_begin {index}")

        node = _graph_node(output)
        if node is not None:
            node.register_prehook(begins)


def _graph_node(output: Any) -> Any:
    """The autograd node of compiled code behind an output, looking through views."""
    waiting = [
        leaf.grad_fn
        for leaf in tree_leaves(output)
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    ]
    for _ in range(20):
        if not waiting:
            return None
        node = waiting.pop(0)
        if "CompiledFunction" in node.name():
            return node
        waiting.extend(follower for follower, _ in node.next_functions if follower is not None)
    return None


class _Held:
    """A saved tensor that marks when it is let go."""

    def __init__(self, call: int, tensor: torch.Tensor) -> None:
        self.call, self.tensor = call, tensor

    def __del__(self) -> None:
        mark(f"release {self.call} {_address(self.tensor)}")


class _Marks:
    """Marks what the recompute engine does."""

    def replay_begins(self, run: tuple[int, int]) -> None:
        mark(f"replay_begin {run[0]} {run[1]}")

    def replay_ends(self, run: tuple[int, int]) -> None:
        mark(f"replay_end {run[0]} {run[1]}")

    def replay_enters(self, index: int) -> None:
        mark(f"replay_enter {index}")

    def replay_exits(self, index: int) -> None:
        mark(f"replay_exit {index}")

    def run_is_done(self, run: tuple[int, int]) -> None:
        mark(f"done {run[0]} {run[1]}")

    def run_saved(self, run: tuple[int, int], holders: list[Any]) -> None:
        for order, holder in enumerate(holders):
            if holder is None:  # its graph was dropped in the forward, as before a detach()
                continue
            weakref.finalize(holder, mark, f"let_go {run[0]} {order}").atexit = False

    def bookkeeping(self, index: int, begins: bool) -> None:
        mark(f"bookkeeping_{'begin' if begins else 'end'} {index}")


def _address(tensor: torch.Tensor) -> int:
    return storages_of(tensor)[0].data_ptr()
