"""Run the forward once with hooks and write down every module call: the tree of visits.

Saved tensors are dropped as they are made, so the run needs no more memory than inference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from memfit.errors import ModelError
from memfit.ir.step_graph import LOSS
from memfit.measure.memory import storages_of
from memfit.measure.step import explained_errors
from memfit.runtime.calls import Forward, replaced_forward
from memfit.runtime.loss_calls import loss_calls, loss_module
from memfit.runtime.recompute import is_statistics_norm
from memfit.workload import Workload, unwrap


@dataclass
class Visit:
    """One call of a module: what it saved for backward, what came in and went out."""

    module: str
    kind: str
    number: int
    children: list[Visit] = field(default_factory=list)
    saved_bytes: int = 0
    packs: tuple[int, int] = (0, 0)  # tensors saved in the step before it began and ended
    inputs: tuple[int, ...] = ()  # serial numbers of tensors
    outputs: tuple[int, ...] = ()
    changed: frozenset[int] = frozenset()  # inputs that are not as the module left them they are of
    mutated_inputs: frozenset[int] = frozenset()
    mutated_buffers: tuple[str, ...] = ()
    container: bool = False
    several: bool = False  # whether it runs several operators of its own, and no module
    hidden: bool = False  # what it saves goes elsewhere: under no_grad, in a checkpoint of its own
    storages: set[StorageWeakRef] = field(default_factory=set, repr=False)

    @property
    def leaf(self) -> bool:
        """Whether it is a single layer: it called no other module."""
        return not self.children and not self.several

    def walk(self) -> Iterator[Visit]:
        """This visit and all below it, in calling order."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass
class Discovery:
    """The module calls of one forward; `root` stands for the step itself."""

    root: Visit
    visits_of: dict[str, int]  # how often each module was called
    loss: torch.Tensor


class _Watch:
    def __init__(self, workload: Workload) -> None:
        self.model = unwrap(workload.model)
        self.root = Visit("", "step", 0)
        self.stack = [self.root]
        self.counts: dict[str, int] = {}
        self.packs = 0
        self._probed = False
        self._serials: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._left: WeakIdKeyDictionary = WeakIdKeyDictionary()  # outputs -> their versions then
        self._next = 0
        static = [*self.model.parameters(), *self.model.buffers(), *workload.batch_tensors()]
        self._static = {StorageWeakRef(s) for t in static for s in storages_of(t)}
        self._recent: tuple[Visit, list[tuple[torch.Tensor, int]]] | None = None

    def serial(self, tensor: torch.Tensor) -> int:
        if tensor not in self._serials:
            self._serials[tensor] = self._next
            self._next += 1
        return int(self._serials[tensor])

    def sees_saved(self) -> bool:
        """Whether what is saved for backward here comes to `pack`."""
        self._probed = True
        torch.ones((), requires_grad=True).exp()
        seen, self._probed = not self._probed, False
        return seen

    def pack(self, tensor: torch.Tensor) -> None:
        if self._probed:
            self._probed = False
            return
        self.packs += 1
        for storage in storages_of(tensor):
            key = StorageWeakRef(storage)
            if key in self._static:
                continue
            for visit in self.stack:
                if key not in visit.storages:
                    visit.storages.add(key)
                    visit.saved_bytes += storage.nbytes()

    def wrap(self, name: str, module: torch.nn.Module, forward: Forward) -> Forward:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = self.counts.get(name, 0)
            self.counts[name] = number + 1
            visit = Visit(name, type(module).__name__, number)
            visit.container = type(module) is torch.nn.Sequential
            visit.several = name == LOSS
            visit.hidden = self.stack[-1].hidden or not self.sees_saved()
            self.stack[-1].children.append(visit)
            tensors = _tensors((args, kwargs))
            visit.inputs = tuple(self.serial(t) for t in tensors)
            versions = [(t, t._version) for t in tensors if not t.is_inference()]
            changed = (t for t, version in versions if self._left.get(t, version) != version)
            visit.changed = frozenset(self.serial(t) for t in changed)
            buffers = {n: (b, b._version) for n, b in _plain_buffers(module)}
            self._check_recent()
            start = self.packs
            self.stack.append(visit)
            try:
                output = forward(*args, **kwargs)
            finally:
                self.stack.pop()
            visit.packs = (start, self.packs)
            visit.outputs = tuple(self.serial(t) for t in _tensors(output))
            self._left.update((t, t._version) for t in _tensors(output) if not t.is_inference())
            self._note_mutations(visit, versions)
            visit.mutated_buffers = tuple(
                n for n, b in _plain_buffers(module) if not _unchanged(b, buffers.get(n))
            )
            self._recent = (visit, [(t, t._version) for t, _ in versions])
            return output

        return call

    def _check_recent(self) -> None:
        """Notice code that changes a module's input in place just after the module ran."""
        if self._recent is not None:
            visit, versions = self._recent
            self._note_mutations(visit, versions)
            self._recent = None

    def _note_mutations(self, visit: Visit, versions: list[tuple[torch.Tensor, int]]) -> None:
        visit.mutated_inputs |= {self.serial(t) for t, v in versions if t._version != v}


def discover(workload: Workload, *, loss: bool = False) -> Discovery:
    """Run one forward and return its tree of module calls; with `loss`, the cross-entropy's too."""
    watch = _Watch(workload)
    modules = dict(watch.model.named_modules())
    with ExitStack() as stack:
        if loss:
            modules[LOSS] = loss_module(watch.model)
            stack.enter_context(loss_calls(watch.model))
        for name, module in modules.items():
            stack.enter_context(replaced_forward(module, partial(watch.wrap, name, module)))
        stack.enter_context(dropped_saved_tensors(watch.pack))
        stack.enter_context(explained_errors(workload))
        made = workload.compute_loss().detach()
        watch._check_recent()
    for visit in watch.root.walk():
        visit.storages = set()
    return Discovery(watch.root, watch.counts, made)


@contextmanager
def dropped_saved_tensors(seen: Any) -> Iterator[None]:
    """Show each tensor saved for backward to `seen`, then drop it: backward cannot run."""

    def unpack(_: Any) -> torch.Tensor:
        raise ModelError(
            "the forward asks for what it saved: it runs a backward of its own, as for a gradient "
            "penalty, and a plan knows one backward after the forward",
            hint="leave what calls torch.autograd.grad or backward() out of loss_fn, or train such "
            "steps without a plan, under memfit.pressure",
        )

    with torch.autograd.graph.saved_tensors_hooks(seen, unpack):
        yield


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _unchanged(buffer: torch.Tensor, before: tuple[torch.Tensor, int] | None) -> bool:
    """Whether it is the same tensor with the same content; code may put another in its place."""
    return before is not None and before[0] is buffer and before[1] == buffer._version


def _plain_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Buffers whose changes a replay must undo by copy: all but running statistics."""
    found = []
    for path, inner in module.named_modules():
        if is_statistics_norm(inner):
            continue
        for name, buffer in inner.named_buffers(recurse=False):
            found.append((f"{path}.{name}" if path else name, buffer))
    return found
