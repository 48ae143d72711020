"""Follow every storage of one step from birth to death, and count the step's work.

A step on fake tensors has no allocator to ask: storages are found in what operators return, and
weak references tell when they die. Memory that a kernel takes and gives back inside is not seen.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfit.estimating.history import Block, History, Moment
from memfit.estimating.work import Work
from memfit.measure.memory import storages_of
from memfit.measure.step import run_step
from memfit.runtime.calls import Forward, replaced_forward
from memfit.workload import Workload, unwrap

Calls = Sequence[tuple[str, int]]  # module and which of its calls, of each segment


def trace_step(workload: Workload, calls: Calls, grain: int) -> tuple[History, Work]:
    """Run one step; return its blocks in multiples of `grain` bytes, and its work."""
    trace = _Trace(grain)
    trace.add_static(workload)
    segments = _Segments(trace, calls)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection in between would free at a random place
    try:
        with ExitStack() as stack:
            modules = dict(unwrap(workload.model).named_modules())
            for name in dict.fromkeys(module for module, _ in calls):
                wrap = partial(segments.wrap, name)
                stack.enter_context(replaced_forward(modules[name], wrap))
            stack.enter_context(segments.saved_tensors())
            stack.enter_context(trace)
            run_step(workload, phase=partial(trace.begin, workload))
    finally:
        if collecting:
            gc.enable()
    return trace.history(), trace.work


class _Trace(TorchDispatchMode):
    def __init__(self, grain: int) -> None:
        super().__init__()
        self.work = Work()
        self.phase, self.segment = "forward", -1
        self._grain = grain
        self._blocks: list[Block] = []
        self._alive: dict[int, Block] = {}  # by the storage's address in torch
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._moments: list[Moment] = [Moment("forward", -1)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._moments.append(Moment(self.phase, self.segment))
        result = func(*args, **kwargs)
        born = False
        for tensor in _tensors(result):
            if tensor.device.type == "meta":
                continue  # made to ask for a shape: it has no memory on any device
            for storage in storages_of(tensor):
                born |= self._note(storage, "temporaries", str(func))
        self.work.add(func, args, kwargs, result, made=born)
        return result

    def begin(self, workload: Workload, phase: str) -> None:
        """A phase of the step begins: all gradients are there when the optimizer's does."""
        if phase == "optimizer":
            for parameter in workload.model.parameters():
                for block in self.blocks_of(parameter.grad):
                    block.category = "gradients"
        self.phase, self.segment = phase, -1

    def add_static(self, workload: Workload) -> None:
        """Note what is there before the step; each storage counts in the first that has it."""
        model = unwrap(workload.model)
        state = tree_leaves([list(s.values()) for s in workload.optimizer.state.values()])
        # Counters of steps are single numbers that an optimizer keeps on the host.
        held = [t for t in state if isinstance(t, torch.Tensor) and t.dim()]
        for category, tensors in (
            ("parameters", model.parameters()),
            ("optimizer_state", held),
            ("buffers", model.buffers()),
            ("batch", workload.batch_tensors()),
        ):
            for tensor in tensors:
                for storage in storages_of(tensor):
                    self._note(storage, category, category)

    def blocks_of(self, tensor: torch.Tensor | None) -> Iterator[Block]:
        """The blocks a tensor lies in."""
        for storage in () if tensor is None else storages_of(tensor):
            if storage._cdata in self._alive:
                yield self._alive[storage._cdata]

    def history(self) -> History:
        """What was noted; blocks that are alive still die after the end."""
        for block in self._alive.values():
            block.death = len(self._moments)
        return History(self._blocks, self._moments)

    def _note(self, storage: torch.UntypedStorage, category: str, origin: str) -> bool:
        key = storage._cdata
        if key in self._alive:
            return False
        size = -(-storage.nbytes() // self._grain) * self._grain
        block = Block(size, len(self._moments) - 1, category, origin)
        self._blocks.append(block)
        self._alive[key] = block
        self._watches[key] = weakref.ref(storage, partial(self._died, key))
        return True

    def _died(self, key: int, _: Any) -> None:
        self._alive.pop(key).death = len(self._moments)
        del self._watches[key]


class _Segments:
    """Tells the trace which segment is at work, and which tensors it saves and takes."""

    def __init__(self, trace: _Trace, calls: Calls) -> None:
        self._trace = trace
        self._index = {call: index for index, call in enumerate(calls)}
        self._visits: dict[str, int] = {}

    def wrap(self, name: str, forward: Forward) -> Forward:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = self._visits.get(name, 0)
            self._visits[name] = number + 1
            segment = self._index.get((name, number), -1)
            for tensor in _tensors((args, kwargs)):
                for block in self._trace.blocks_of(tensor):
                    block.inputs.add(segment)
            before = self._trace.segment
            self._trace.segment = segment
            try:
                return forward(*args, **kwargs)
            finally:
                self._trace.segment = before

        return call

    @contextmanager
    def saved_tensors(self) -> Iterator[None]:
        """See tensors as they are saved, and in backward as they are used."""

        def pack(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
            segment = self._trace.segment
            for block in self._trace.blocks_of(tensor):
                if block.category == "temporaries":
                    block.category = "activations"
                if block.category == "activations":
                    block.savers.add(segment)
            return segment, tensor.detach()  # the tensor itself might hold its own graph

        def unpack(packed: tuple[int, torch.Tensor]) -> torch.Tensor:
            self._trace.segment, tensor = packed
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
