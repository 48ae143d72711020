"""Run segments as compiled forward and backward pairs that keep a chosen set of tensors.

Each segment is compiled by itself; modules of one class share a compilation. Executors: `graph`
runs the traced operators as they are, `inductor` lets torch fuse them. A segment that cannot be
traced as one graph raises CannotCapture: its caller runs it as the module does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from memfit.ir.joint_graph import JointGraph
from memfit.measure.nodes import NodeCost
from memfit.runtime.compile.ahead import Workers, worker_count
from memfit.runtime.compile.choice import CannotCapture, Choice, OtherGraph, OtherShape, no_graph
from memfit.runtime.compile.joint import input_shapes, names_in, structure_of
from memfit.runtime.compile.shapes import Shapes

if TYPE_CHECKING:
    from memfit.runtime.compile.backend import Program

EXECUTORS = ("graph", "inductor")

Forward = Callable[..., Any]
Watch = Callable[[str, torch.Tensor], None]


@cache
def compiled_segments(executor: str) -> CompiledSegments:
    """The compiled code of this process: what one fit compiled the next one finds."""
    return CompiledSegments(executor)


class CompiledSegments:
    """Compiles and runs segment calls; knows every joint graph it has met.

    `last_key` is the graph that the latest call ran, None when it needed no gradient.
    """

    def __init__(self, executor: str) -> None:
        assert executor in EXECUTORS, executor
        self.executor = executor
        self.graphs: dict[str, JointGraph] = {}
        self.last_key: str | None = None
        self.compilations = 0
        self.watch: Watch | None = None
        self.returned: Callable[[], None] | None = None  # is told when a backward returns
        self.runs = 0  # compiled forwards that began
        self.said: set[str] = set()  # warnings
        self.workers = Workers(0)
        self.made_ahead: set[Hashable] = set()  # what workers compiled
        self._programs: dict[tuple[Forward, Choice], Program] = {}
        self._shapes: dict[tuple[Forward, str, Choice], Shapes] = {}
        self._measuring = False
        self._measured: set[str] = set()

    def __call__(
        self,
        forward: Forward,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        key: str | None = None,
        saved: Sequence[str] | None = None,
    ) -> Any:
        """Run one call of a segment; with `saved`, keep exactly those nodes of graph `key`."""
        return self.bind(forward, key=key, saved=saved)(*args, **kwargs)

    def bind(
        self,
        forward: Forward,
        *,
        key: str | None = None,
        saved: Sequence[str] | None = None,
        mutated_buffers: Sequence[str] = (),
    ) -> Forward:
        """Compiled code to run in the place of a module's `forward`.

        With `saved`, it keeps exactly those nodes of the graph `key`; for other sizes than those
        of that graph see `shapes`. OtherGraph when the segment runs another one.
        """
        assert saved is None or key is not None, "names belong to a graph"
        names = None if saved is None else tuple(sorted(set(saved)))
        planned: Shapes | None = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal planned
            module, function = _bound(forward, planned=key is not None)
            if key is None or (self._measuring and names is None):
                return self._unplanned(function, module, key, args, kwargs)
            if planned is None:
                choice = Choice(self.executor == "graph", structure_of(key), names)
                planned = self._planned(function, module, key, choice, mutated_buffers)
            if self.workers.most and not planned.has_code:
                return self._as_traced(planned, module, args, kwargs)
            return planned(module, args, kwargs)

        return run

    def notes(self, keys: Collection[str]) -> list[str]:
        """What had to be done otherwise than these graphs were planned, each said once."""
        known = [s.notes for (_, key, _), s in self._shapes.items() if key in keys]
        return list(dict.fromkeys(note for notes in known for note in notes))

    def check(self, choice: Choice, graph: JointGraph, kind: str) -> None:
        """Refuse a graph that is not the planned one.

        OtherShape when the planned one is known and was for other shapes, OtherGraph otherwise.
        """
        found = structure_of(graph.key)
        if choice.structure in (None, found):
            return
        planned = self._with_structure(choice.structure)
        if planned and all(input_shapes(g) != input_shapes(graph) for g in planned):
            raise OtherShape(f"{kind} runs other operators for these shapes")
        raise OtherGraph(
            f"{kind} no longer runs the operators it was planned for "
            f"(graph {found}, planned {choice.structure})",
            hint="the model, its mode or its inputs changed: make a new plan",
        )

    def check_key(self, choice: Choice, key: str | None, kind: str) -> None:
        """The same for a graph that ran; one with symbolic sizes has no fixed ones to compare."""
        if key in self.graphs:
            self.check(choice, self.graphs[key], kind)

    def symbolic_names(self, choice: Choice, graph: JointGraph, kind: str) -> tuple[str, ...]:
        """The chosen nodes in a graph with symbolic sizes; OtherShape when it is another one."""
        assert choice.saved is not None
        for planned in self._with_structure(choice.structure)[:1]:
            names = names_in(planned, graph)
            if names is not None:
                return tuple(names[name] for name in choice.saved)
        raise OtherShape(f"{kind} runs other operators when its sizes are symbols")

    def _with_structure(self, structure: str | None) -> list[JointGraph]:
        return [g for g in self.graphs.values() if structure_of(g.key) == structure]

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Time the operators of each graph when it first runs, unplanned, in this block.

        The results stand in `graphs`. Under `inductor` such calls are not fused and draw other
        random numbers in the backward: use their gradients for nothing.
        """
        before, self._measuring = self._measuring, True
        try:
            yield
        finally:
            self._measuring = before

    @property
    def worker_count(self) -> int:
        """How many other processes may compile for this one."""
        return worker_count() if self.executor == "inductor" else 0

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Let other processes compile what is first met in this block; they end with it.

        Calls without code run as traced meanwhile. What the block met is compiled in this process
        after it, with the code that the others left in torch's cache. See `ahead.py`.
        """
        assert not self.workers.most, "there are workers already"
        self.workers = Workers(self.worker_count)
        self.workers.prepare()
        try:
            yield
            self.workers.close()
            self.made_ahead |= self.workers.work
        finally:
            self.workers.kill()
            self.workers = Workers(0)

    @contextmanager
    def watched(
        self, watch: Watch | None, returned: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Show `watch` the inputs and results of every forward graph run, with their names.

        `returned` is called whenever a backward graph has run.
        """
        before = self.watch, self.returned
        self.watch, self.returned = watch, returned or self.returned
        try:
            yield
        finally:
            self.watch, self.returned = before

    def close(self) -> None:
        """Drop the compiled code; graphs stay known."""
        for program in self._programs.values():
            program.close()
        self._programs.clear()
        self._shapes.clear()

    def found(self, graph: JointGraph) -> JointGraph:
        """Take in a traced graph; return what is known of it so far."""
        known = self.graphs.get(graph.key, graph)
        if not known.unplanned:
            known = replace(known, unplanned=graph.unplanned)
        self.graphs[graph.key] = known
        return known

    def begins(self, key: str | None) -> None:
        """Take note that a compiled forward begins."""
        self.last_key = key
        self.runs += 1

    def wants_costs(self, key: str) -> bool:
        """Whether this run of a graph is the one to be timed; nothing else may run then."""
        return self._measuring and key not in self._measured and not self.workers.work

    def measured(self, key: str, costs: Mapping[str, NodeCost]) -> None:
        """Put the operators' costs into their graph."""
        self._measured.add(key)
        graph = self.graphs[key]
        nodes = (
            replace(node, seconds=cost.seconds, workspace_bytes=cost.workspace_bytes)
            if (cost := costs.get(node.name))
            else node
            for node in graph.nodes
        )
        self.graphs[key] = replace(graph, nodes=tuple(nodes))

    def program(self, function: Forward, choice: Choice, kind: str) -> Program:
        """The code for a choice."""
        # An unplanned segment runs one code whatever graph the plan says: it is checked after.
        shared = choice if choice.saved is not None else replace(choice, structure=None)
        program = self._programs.get((function, shared))
        if program is None:
            from memfit.runtime.compile.backend import Program  # loads dynamo, which takes seconds

            program = Program(self, function, kind, shared)
            self._programs[function, shared] = program
        return program

    def _unplanned(
        self,
        function: Forward,
        module: torch.nn.Module,
        key: str | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run code for this very shape."""
        kind = type(module).__name__
        choice = Choice(
            self.executor == "graph" or self._measuring, None if key is None else structure_of(key)
        )
        result = self.program(function, choice, kind)(module, args, kwargs)
        self.check_key(choice, self.last_key, kind)
        return result

    def _as_traced(
        self,
        planned: Shapes,
        module: torch.nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a planned call once without its code, which a worker makes."""
        before = self.compilations
        program = self.program(planned.function, replace(planned.choice, plain=True), planned.kind)
        result = program(module, args, kwargs)
        self.compilations = before  # those of the code are counted
        return result

    def _planned(
        self,
        function: Forward,
        module: torch.nn.Module,
        key: str,
        choice: Choice,
        mutated_buffers: Sequence[str],
    ) -> Shapes:
        shapes = self._shapes.get((function, key, choice))
        if shapes is None:
            kind = type(module).__name__
            shapes = Shapes(self, function, kind, choice, mutated_buffers)
            self._shapes[function, key, choice] = shapes
        return shapes


def _bound(forward: Forward, planned: bool) -> tuple[torch.nn.Module, Forward]:
    """The module and the plain function behind a bound forward."""
    module, function = getattr(forward, "__self__", None), getattr(forward, "__func__", None)
    if not isinstance(module, torch.nn.Module) or not isinstance(function, FunctionType):
        name = getattr(forward, "__qualname__", type(forward).__name__)
        reason = CannotCapture(f"the forward is no method of a module: {name}")
        raise no_graph(reason) if planned else reason
    return module, function
