"""Run segments as compiled forward and backward pairs that keep a chosen set of tensors.

Each segment is compiled by itself; modules of one class share a compilation. Executors: `graph`
runs the traced operators as they are, `inductor` lets torch fuse them. A segment that cannot be
traced as one graph raises CannotCapture: its caller runs it as the module does.
"""

from __future__ import annotations

import threading
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
from memfit.runtime.compile.joint import dtypes, input_sizes, names_in, structure_of
from memfit.runtime.compile.shapes import Shapes

if TYPE_CHECKING:
    from memfit.runtime.compile.backend import Program

EXECUTORS = ("graph", "inductor")

Forward = Callable[..., Any]
Watch = Callable[[str, torch.Tensor], None]


class _Here(threading.local):
    """What a thread wants to see and has run: models may run in several threads at once."""

    watch: Watch | None = None
    last_key: str | None = None


@cache
def compiled_segments(executor: str) -> CompiledSegments:
    """The compiled code of this process: what one fit compiled the next one finds."""
    return CompiledSegments(executor)


class CompiledSegments:
    """Compiles and runs segment calls; knows every joint graph it has met.

    `last_key` is the graph that this thread's latest call ran, None when it needed no gradient.
    """

    def __init__(self, executor: str) -> None:
        assert executor in EXECUTORS, executor
        self.executor = executor
        self.graphs: dict[str, JointGraph] = {}
        self.compilations = 0
        self._here = _Here()
        self._watch: Watch | None = None  # of all threads: a replay may run in autograd's
        self.returned: Callable[[], None] | None = None  # is told when a backward returns
        self.runs = 0  # compiled forwards that began
        self.said: set[str] = set()  # warnings
        self.workers = Workers(0)
        self.made_ahead: set[Hashable] = set()  # what workers compiled
        self._programs: dict[tuple[Forward, Choice], Program] = {}
        self._shapes: dict[tuple[Forward, str, Choice], Shapes] = {}
        self._measuring = False
        self._measured: set[str] = set()

    @property
    def last_key(self) -> str | None:
        """The graph that the latest call in this thread ran."""
        return self._here.last_key

    @last_key.setter
    def last_key(self, key: str | None) -> None:
        self._here.last_key = key

    @property
    def watch(self) -> Watch | None:
        """What is shown the tensors of forward graphs that run in this thread."""
        return self._here.watch or self._watch

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
        accepted = {None, key}  # graphs that ran

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
            try:
                result = planned(module, args, kwargs)
            except OtherShape as error:  # for sizes that ran before: something else has changed
                raise _other_graph(planned.kind, error.message) from error
            if self.last_key not in accepted:
                self._check_dtypes(key, planned.kind)
                accepted.add(self.last_key)
            return result

        return run

    def notes(self, keys: Collection[str]) -> list[str]:
        """What had to be done otherwise than these graphs were planned, each said once."""
        known = [s.notes for (_, key, _), s in self._shapes.items() if key in keys]
        return list(dict.fromkeys(note for notes in known for note in notes))

    def check(self, choice: Choice, graph: JointGraph, kind: str) -> None:
        """Refuse a graph that is not the planned one.

        OtherShape when the planned one is known and was for other sizes, OtherGraph otherwise.
        """
        found = structure_of(graph.key)
        if choice.structure in (None, found):
            _refuse_unknown(choice.saved or (), graph, kind)
            return
        planned = self._with_structure(choice.structure)
        same_sizes = [g for g in planned if input_sizes(g) == input_sizes(graph)]
        if planned and not same_sizes:
            raise OtherShape(f"{kind} runs other operators for these shapes")
        here = set(dtypes(graph))
        other = bool(planned) and all(set(dtypes(g)) != here for g in same_sizes)
        raise _other_graph(kind, f"graph {found}, planned {choice.structure}", other_dtypes=other)

    def _check_dtypes(self, key: str, kind: str) -> None:
        """OtherGraph when the latest call had the planned sizes and other dtypes."""
        ran, planned = self.graphs.get(self.last_key or key), self.graphs.get(key)
        if ran is None or planned is None or input_sizes(ran) != input_sizes(planned):
            return
        if structure_of(ran.key) != structure_of(key):
            return
        for was, now in zip(dtypes(planned), dtypes(ran), strict=True):
            if was != now:
                raise _other_graph(kind, f"{now} where {was} was planned", other_dtypes=True)

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
        before = self._watch, self.returned
        self._watch, self.returned = watch, returned or self.returned
        try:
            yield
        finally:
            self._watch, self.returned = before

    @contextmanager
    def watched_here(self, watch: Watch) -> Iterator[None]:
        """Show `watch` what runs in this thread, after whoever is watching already."""
        outer, before = self.watch, self._here.watch

        def both(node: str, tensor: torch.Tensor) -> None:
            assert outer is not None
            outer(node, tensor)
            watch(node, tensor)

        self._here.watch = watch if outer is None else both
        try:
            yield
        finally:
            self._here.watch = before

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
            replace(
                node,
                seconds=cost.seconds,
                workspace_bytes=cost.workspace_bytes,
                read_s=cost.read_s,
            )
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


def _refuse_unknown(names: Collection[str], graph: JointGraph, kind: str) -> None:
    """OtherGraph when names that a plan keeps are none of the graph's."""
    unknown = [name for name in names if name not in graph.index]
    if unknown:
        raise OtherGraph(
            f"the plan keeps {unknown[0]!r} of {kind}, which has no tensor of that name",
            hint="the plan was changed since it was made: make a new one",
        )


def _other_graph(kind: str, how: str, *, other_dtypes: bool = False) -> OtherGraph:
    """The error of a segment that has changed; `other_dtypes` say in what way."""
    return OtherGraph(
        f"{kind} no longer runs the operators it was planned for ({how})",
        hint="the step was planned under other autocast settings, or for inputs of other dtypes: "
        "run it as it was planned, or make a new plan"
        if other_dtypes
        else "the model, its mode, its autocast settings or its inputs changed: make a new plan",
    )


def _bound(forward: Forward, planned: bool) -> tuple[torch.nn.Module, Forward]:
    """The module and the plain function behind a bound forward."""
    module, function = getattr(forward, "__self__", None), getattr(forward, "__func__", None)
    if not isinstance(module, torch.nn.Module) or not isinstance(function, FunctionType):
        name = getattr(forward, "__qualname__", type(forward).__name__)
        reason = CannotCapture(f"the forward is no method of a module: {name}")
        raise no_graph(reason) if planned else reason
    return module, function
