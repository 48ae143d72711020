"""Capture: the joint graph of every segment that has one, found by compiling it alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from memfit.capture.discover import dropped_saved_tensors
from memfit.capture.segments import Segment
from memfit.ir.joint_graph import JointGraph
from memfit.measure.counters import changed_since, numbers_of
from memfit.measure.device import PRODUCT_GRAIN
from memfit.measure.step import explained_errors, is_out_of_memory
from memfit.runtime.calls import Forward, Route, Wrap, named_modules, routed
from memfit.runtime.compile.choice import CannotCapture
from memfit.runtime.compile.compiled import CompiledSegments, compiled_segments
from memfit.workload import Workload

# The first compiles; a module that fills a cache when it first runs is compiled in the second too.
_MOST_FORWARDS = 3


@dataclass(frozen=True)
class Captured:
    """The segment calls of a step and how each runs: by a joint graph, or as its module does."""

    segments: tuple[Segment, ...]
    compiled: CompiledSegments | None = None
    keys: Mapping[int, str] = field(default_factory=dict)  # call -> its joint graph
    # call -> why it has none; single layers have nothing inside to plan
    reasons: Mapping[int, str] = field(default_factory=dict)

    @property
    def route(self) -> Route:
        """The calls as a router needs them."""
        calls = [(s.visit.module, s.visit.number, s.visits) for s in self.segments]
        return Route(calls, self.segments[0].model_calls)

    @property
    def code(self) -> dict[int, Wrap]:
        """What runs in the place of each captured call's forward, when nobody decides."""
        if self.compiled is None:
            return {}
        return {i: partial(self.compiled.bind, key=key) for i, key in self.keys.items()}

    @property
    def graphs(self) -> list[JointGraph]:
        """The distinct joint graphs, in the order they come up in the step."""
        if self.compiled is None:
            return []
        return [self.compiled.graphs[key] for key in dict.fromkeys(self.keys.values())]

    def modules(self, model: torch.nn.Module) -> dict[int, torch.nn.Module]:
        """The module of each segment call."""
        modules = named_modules(model, [s.visit.module for s in self.segments])
        return {i: modules[s.visit.module] for i, s in enumerate(self.segments)}

    def recomputed_alone(self) -> list[int]:
        """The calls that are recomputed, each by itself, to record a step in little memory."""
        found = enumerate(self.segments)
        return [i for i, s in found if not s.visit.leaf and s.pinned is None]


def capture_segments(workload: Workload, segments: tuple[Segment, ...], executor: str) -> Captured:
    """Compile every segment by itself in forwards that keep nothing, and time its operators.

    The last forward must compile nothing: what it still compiles changes from call to call.
    """
    if executor == "module":
        return Captured(segments)
    engine = _Capture(segments, compiled_segments(executor))
    found = Captured(segments)
    with (
        routed(workload.model, found.route, engine),
        explained_errors(workload),
        dropped_saved_tensors(lambda tensor: None),
        engine.compiled.measuring(),
    ):
        for number in range(_MOST_FORWARDS):
            engine.changing.clear()
            engine.first = not number
            # What other processes compile here is the unplanned code, which runs next.
            with nullcontext() if number else engine.compiled.ahead():
                workload.compute_loss()
            if not engine.changing:
                break
    engine.give_up_changing()
    return Captured(segments, engine.compiled, engine.keys, engine.reasons)


class _Capture:
    """An engine that compiles each call, or notes why it cannot."""

    replaying = False

    def __init__(self, segments: Sequence[Segment], compiled: CompiledSegments) -> None:
        self.segments, self.compiled = segments, compiled
        self.keys: dict[int, str] = {}
        self.reasons: dict[int, str] = {}
        self.changing: dict[int, str] = {}  # calls that were compiled, with the module's class
        self.first = True  # whether this is the first forward

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def __call__(self, index: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        segment = self.segments[index]
        if index in self.reasons:
            return forward(*args, **kwargs)
        if segment.visit.leaf and not self._is_padded(forward):  # it has nothing inside to plan
            return forward(*args, **kwargs)
        if segment.pinned:
            self.reasons[index] = segment.pinned
            return forward(*args, **kwargs)
        before = self.compiled.compilations
        module = getattr(forward, "__self__", None)
        numbers = numbers_of(module) if isinstance(module, torch.nn.Module) else {}
        try:
            output = self.compiled(forward, args, kwargs)
        except CannotCapture as reason:
            self.reasons[index] = str(reason)
            return forward(*args, **kwargs)
        except RuntimeError as error:  # torch traced a layout that its operator does not give
            if is_out_of_memory(error):
                raise
            output = forward(*args, **kwargs)  # unless the model itself is wrong
            line = str(error).strip().partition("\n")[0]
            self.reasons[index] = f"{segment.visit.kind}: its compiled code fails: {line}"
            return output
        counted = changed_since(numbers)
        if counted and not self.first:  # code is made for one number, or for those of one kind
            owner, name = counted[0]
            self.keys.pop(index, None)
            self.reasons[index] = (
                f"{segment.visit.kind}: its forward changes {name}, a number of a "
                f"{type(owner).__name__}"
            )
            return output
        if counted or self.compiled.compilations > before:
            self.changing[index] = segment.visit.kind
        if self.compiled.last_key is None:
            self.reasons[index] = "it needs no gradient"
        else:
            self.keys[index] = self.compiled.last_key
        return output

    def _is_padded(self, forward: Forward) -> bool:
        """Whether fused code runs a single layer faster: a linear one with odd sizes, on CUDA.

        Its matrix products are slow there, and inductor pads them.
        """
        layer = getattr(forward, "__self__", None)
        if self.compiled.executor != "inductor" or not isinstance(layer, torch.nn.Linear):
            return False
        return layer.weight.is_cuda and any(size % PRODUCT_GRAIN for size in layer.weight.shape)

    def give_up_changing(self) -> None:
        """Let the calls run as their modules do that every forward compiled."""
        for index, kind in self.changing.items():
            self.keys.pop(index, None)
            self.reasons.setdefault(
                index,
                f"{kind}: it is compiled again at each call: "
                "its code reads a value that changes from call to call",
            )
