"""Run segments as compiled forward and backward pairs that keep a chosen set of tensors.

Each segment is compiled by itself; modules of one class share a compilation. Executors: `graph`
runs the traced operators as they are, `inductor` lets torch fuse them. A segment that cannot be
traced as one graph raises CannotCapture: its caller runs it as the module does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from memfit.errors import MemfitError, PlanFileError
from memfit.ir.joint_graph import JointGraph
from memfit.measure.nodes import NodeCost
from memfit.runtime.joint import structure_of

if TYPE_CHECKING:
    from memfit.runtime.backend import Program

EXECUTORS = ("graph", "inductor")

Forward = Callable[..., Any]
Watch = Callable[[str, torch.Tensor], None]


class CannotCapture(MemfitError):
    """A segment that cannot be run as one compiled graph; `reason` is one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class OtherGraph(PlanFileError):
    """A segment that runs other operators than those it was planned for.

    Besides another model this can be another shape: torch copies less when a size is 1.
    """


@dataclass(frozen=True)
class Choice:
    """What a segment keeps: a set of names of one graph structure, or what is kept unplanned.

    `plain`: its operators run one by one, as they must to be timed.
    """

    plain: bool
    structure: str | None = None
    saved: tuple[str, ...] | None = None

    def check(self, key: str, kind: str) -> None:
        """OtherGraph when a segment has another graph than it was planned for."""
        found = structure_of(key)
        if self.structure not in (None, found):
            raise OtherGraph(
                f"{kind} no longer runs the operators it was planned for "
                f"(graph {found}, planned {self.structure})",
                hint="the model, its mode or its inputs changed: make a new plan",
            )


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
        self._programs: dict[tuple[Forward, Choice], Program] = {}
        self._measuring = False
        self._measured: set[str] = set()
        self._runs = 0

    @property
    def unplanned_saved(self) -> dict[str, tuple[str, ...]]:
        """For each graph, the names of the nodes saved when nobody decides."""
        return {
            key: tuple(graph.nodes[i].name for i in graph.unplanned)
            for key, graph in self.graphs.items()
        }

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
        self, forward: Forward, *, key: str | None = None, saved: Sequence[str] | None = None
    ) -> Forward:
        """Compiled code to run in the place of a module's `forward`.

        With `saved`, it keeps exactly those nodes of the graph `key`; a graph of the same
        structure and other sizes will do. OtherGraph when the segment runs another one.
        """
        assert saved is None or key is not None, "names belong to a graph"
        names = None if saved is None else tuple(sorted(set(saved)))
        planned = None if key is None else structure_of(key)

        def run(*args: Any, **kwargs: Any) -> Any:
            module, function = _bound(forward)
            plain = self.executor == "graph" or (self._measuring and names is None)
            choice = Choice(plain, planned, names)
            runs = self._runs
            result = self._program(function, choice, module)(module, args, kwargs)
            if self._runs == runs:
                self.last_key = None
                kind = type(module).__name__
                raise CannotCapture(f"{kind}: torch.compile found nothing to compile")
            if self.last_key is not None:
                choice.check(self.last_key, type(module).__name__)
            return result

        return run

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

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Show `watch` the inputs and results of every forward graph run, with their names."""
        before, self.watch = self.watch, watch
        try:
            yield
        finally:
            self.watch = before

    def close(self) -> None:
        """Drop the compiled code; graphs stay known."""
        for program in self._programs.values():
            program.close()
        self._programs.clear()

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
        self._runs += 1

    def wants_costs(self, key: str) -> bool:
        """Whether this run of a graph is the one to be timed."""
        return self._measuring and key not in self._measured

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

    def _program(self, function: Forward, choice: Choice, module: torch.nn.Module) -> Program:
        # An unplanned segment runs one code whatever graph the plan says: it is checked after.
        shared = choice if choice.saved is not None else Choice(choice.plain)
        program = self._programs.get((function, shared))
        if program is None:
            from memfit.runtime.backend import Program  # loads dynamo, which takes seconds

            program = Program(self, function, type(module).__name__, shared)
            self._programs[function, shared] = program
        return program


def _bound(forward: Forward) -> tuple[torch.nn.Module, Forward]:
    """The module and the plain function behind a bound forward."""
    module, function = getattr(forward, "__self__", None), getattr(forward, "__func__", None)
    if not isinstance(module, torch.nn.Module) or not isinstance(function, FunctionType):
        name = getattr(forward, "__qualname__", type(forward).__name__)
        raise CannotCapture(f"the forward is no method of a module: {name}")
    return module, function
