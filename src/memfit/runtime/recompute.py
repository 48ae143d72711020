"""Recompute runs of segment calls: torch.utils.checkpoint, spread over consecutive modules.

A run of chained calls (each one's input is the output of the call before) is recomputed as one:
only what enters the run is kept. torch's non-reentrant checkpoint is a generator that is entered
when the run's first module starts and left when its last one ends; this is the only module that
touches it. Random numbers are replayed per call, normalisation statistics are frozen during the
replay and numbers that modules count are as they were, so a recomputed step gives the same numbers
as a plain one.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from memfit.measure.counters import (
    Numbers,
    Place,
    as_they_were,
    changed_since,
    numbers_at,
    numbers_of,
)
from memfit.measure.host_random import host_state
from memfit.runtime.calls import Forward
from memfit.runtime.random_state import RandomState

_GENERATOR: Any = torch_checkpoint._checkpoint_without_reentrant_generator
_OPTIONS = {
    "preserve_rng_state": False,  # RandomState does it, per call and cheaper
    "context_fn": torch_checkpoint.noop_context_fn,
    "determinism_check": "default",
    "debug": False,
    "early_stop": True,
}
_ORDER = [
    name
    for name, parameter in inspect.signature(_GENERATOR).parameters.items()
    if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
]


class Observer(Protocol):
    """Is told what the engine does; used to record a step."""

    def replay_begins(self, run: tuple[int, int]) -> None: ...
    def replay_ends(self, run: tuple[int, int]) -> None: ...
    def replay_enters(self, index: int) -> None: ...
    def replay_exits(self, index: int) -> None: ...
    def run_is_done(self, run: tuple[int, int]) -> None: ...
    def bookkeeping(self, index: int, begins: bool) -> None: ...
    def run_saved(self, run: tuple[int, int], holders: list[Any]) -> None: ...


@dataclass
class _Step:
    """One call of a run, as it must be repeated."""

    index: int
    forward: Forward
    spec: TreeSpec
    leaves: list[Any]  # plain values and captured tensors; None where linked or saved by torch
    links: dict[int, int]  # position in leaves -> output leaf of the call before
    saved: list[int]  # positions in leaves that torch's checkpoint keeps
    random: RandomState
    buffers: dict[str, torch.Tensor]
    numbers: Numbers  # of its modules, when they count something
    captured: dict[int, int] = field(default_factory=dict)  # position in leaves -> version


@dataclass
class _Run:
    """A run being recorded, then waiting for its backward."""

    calls: tuple[int, int]
    generator: Any = None
    steps: list[_Step] = field(default_factory=list)
    outputs: list[tuple[Any, int]] = field(default_factory=list)  # of the last call, with versions


class _Done:
    """Dies with the last saved tensor of a run."""

    def __init__(self, run: tuple[int, int], observer: Observer) -> None:
        self.run, self.observer = run, observer

    def __del__(self) -> None:
        self.observer.run_is_done(self.run)


class Recompute:
    """The engine of the `module` executor: recomputes `runs`, keeps everything else."""

    def __init__(
        self,
        runs: Sequence[tuple[int, int]],
        modules: Mapping[int, torch.nn.Module],
        mutated_buffers: Mapping[int, Sequence[str]] | None = None,
        observer: Observer | None = None,
        trim: bool = False,
        compiled: Container[int] = (),
    ) -> None:
        self._trim = trim
        self._compiled = compiled  # calls whose code was made for the module as it stands
        self._run_of = {i: run for run in runs for i in range(run[0], run[1] + 1)}
        self._modules = modules
        self._norms = {i: statistics_norms(modules[i]) for i in self._run_of}
        self._mutated = mutated_buffers or {}
        self.observer = observer
        self._open: _Run | None = None
        self._draws: dict[int, bool] = {}  # whether a call draws from Python's or numpy's numbers
        self._counts: dict[int, list[Place]] = {}  # numbers that a call changes
        self.replays = 0
        self.replaying = False

    def begin(self) -> None:
        """Forget a run that an exception left half recorded."""
        if self._open is not None:
            self._open.generator.close()
            self._open = None

    def end(self) -> None:
        """Give the allocator's free pages back, if the plan says so, before backward needs them."""
        if self._trim and torch.is_grad_enabled():
            torch.cuda.empty_cache()

    def __call__(self, index: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        run = self._run_of.get(index)
        if run is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self.observer:
            self.observer.bookkeeping(index, True)
        self._record(run, index, forward, args, kwargs)
        if self.observer:
            self.observer.bookkeeping(index, False)
        try:
            output = forward(*args, **kwargs)
        except BaseException:
            self.begin()
            raise
        current = self._open
        assert current is not None
        if index not in self._draws:
            step = current.steps[-1]
            self._draws[index] = step.random.host != host_state()
            self._counts[index] = changed_since(step.numbers)
            step.numbers = {place: step.numbers[place] for place in self._counts[index]}
        if index == run[1]:
            self._open = None
            if self.observer:
                self.observer.run_saved(run, _holders(current.generator))
            next(current.generator, None)
            current.outputs = []
        else:
            current.outputs = [(leaf, _version(leaf)) for leaf in tree_leaves(output)]
        return output

    def _record(
        self, run: tuple[int, int], index: int, forward: Forward, args: Any, kwargs: Any
    ) -> None:
        leaves, spec = tree_flatten((args, kwargs))
        # A parameter stays itself: saved, it would come back as another type of tensor.
        tensors = [i for i, leaf in enumerate(leaves) if _is_activation(leaf)]
        step = _Step(
            index=index,
            forward=forward,
            spec=spec,
            leaves=[None if _is_activation(leaf) else leaf for leaf in leaves],
            links={},
            saved=[],
            random=RandomState.of(
                (x.device for x in leaves if isinstance(x, torch.Tensor)),
                host=self._draws.get(index, True),
            ),
            buffers={n: self._buffer(index, n).clone() for n in self._mutated.get(index, ())},
            numbers=self._numbers(index),
        )
        if index == run[0]:
            self.begin()
            self._open = _Run(run)
            step.saved = tensors
            generator = _start(self._replayer(self._open), [leaves[i] for i in tensors])
            self._open.generator = generator
            next(generator)
        else:
            assert self._open is not None and self._open.calls == run, "a run lost its first call"
            for i in tensors:
                source = _position(leaves[i], self._open.outputs)
                if source is None:
                    # Detached, so that the graph it belongs to does not hold itself alive.
                    step.leaves[i] = leaves[i].detach().requires_grad_(leaves[i].requires_grad)
                    step.captured[i] = leaves[i]._version
                else:
                    step.links[i] = source
            self._open.outputs = []
        self._open.steps.append(step)

    def _replayer(self, run: _Run) -> Any:
        steps, calls, observer = run.steps, run.calls, self.observer
        done = None if observer is None else _Done(calls, observer)

        def replay(*saved: torch.Tensor) -> None:
            self.replays += 1
            self.replaying = True
            if observer:
                observer.replay_begins(calls)
            try:
                outputs: list[Any] = []
                for step in steps:
                    outputs = tree_leaves(self._repeat(step, saved, outputs))
            finally:
                self.replaying = False
                if observer:
                    observer.replay_ends(calls)

        replay.done = done  # type: ignore[attr-defined]  # lives as long as the run waits
        return replay

    def _repeat(self, step: _Step, saved: Sequence[torch.Tensor], outputs: list[Any]) -> Any:
        leaves = list(step.leaves)
        for position, tensor in zip(step.saved, saved, strict=True) if step.saved else ():
            leaves[position] = tensor
        for position, source in step.links.items():
            leaves[position] = outputs[source]
        for position, version in step.captured.items():
            if leaves[position]._version != version:
                raise RuntimeError(
                    "a tensor that is needed to repeat a segment was changed in place after the "
                    f"segment's forward: {list(leaves[position].shape)}"
                )
        args, kwargs = tree_unflatten(leaves, step.spec)
        with ExitStack() as stack:
            stack.enter_context(step.random.replayed())
            still = scratch_statistics if step.index in self._compiled else frozen_statistics
            stack.enter_context(still(self._norms[step.index]))
            if step.buffers:
                stack.enter_context(self._old_buffers(step))
            if step.numbers:
                stack.enter_context(as_they_were(step.numbers))
            if self.observer:
                self.observer.replay_enters(step.index)
                stack.callback(self.observer.replay_exits, step.index)
            return step.forward(*args, **kwargs)

    def _numbers(self, index: int) -> Numbers:
        """Those that the call counts; when it runs first, all there are."""
        known = self._counts.get(index)
        return numbers_of(self._modules[index]) if known is None else numbers_at(known)

    def _buffer(self, index: int, name: str) -> torch.Tensor:
        return self._modules[index].get_buffer(name)

    @contextmanager
    def _old_buffers(self, step: _Step) -> Iterator[None]:
        """Let the module see its buffers as they were at its forward, and change only copies."""
        owners = []
        for name, old in step.buffers.items():
            path, _, leaf = name.rpartition(".")
            owner = self._modules[step.index].get_submodule(path)
            owners.append((owner, leaf, owner._buffers[leaf]))
            owner._buffers[leaf] = old
        try:
            yield
        finally:
            for owner, leaf, buffer in owners:
                owner._buffers[leaf] = buffer


def is_statistics_norm(module: torch.nn.Module) -> bool:
    """Whether the module tracks running statistics as torch's batch norms do."""
    return getattr(module, "track_running_stats", False) is True and hasattr(module, "momentum")


def statistics_norms(module: torch.nn.Module) -> list[Any]:
    """The normalisation layers inside `module` that track running statistics."""
    return [m for m in module.modules() if is_statistics_norm(m)]


@contextmanager
def frozen_statistics(norms: Sequence[Any]) -> Iterator[None]:
    """Run normalisation layers without updating their running statistics.

    Momentum 0 leaves the running values bit for bit; the training output does not use them.
    """
    frozen = [m for m in norms if m.training]
    before = [(m, m.momentum, m._buffers.get("num_batches_tracked")) for m in frozen]
    for m in frozen:
        m.momentum = 0.0
        m._buffers["num_batches_tracked"] = None
    try:
        yield
    finally:
        for m, momentum, batches in before:
            m.momentum = momentum
            m._buffers["num_batches_tracked"] = batches


@contextmanager
def scratch_statistics(norms: Sequence[Any]) -> Iterator[None]:
    """Run normalisation layers on running statistics that are thrown away afterwards.

    Compiled code was made for a momentum, so that cannot change; the training output does not use
    the running values, so scratch memory may hold anything.
    """
    before = [(m._buffers, dict(m._buffers)) for m in norms if m.training]
    for buffers, old in before:
        buffers.update({k: None if b is None else torch.zeros_like(b) for k, b in old.items()})
    try:
        yield
    finally:
        for buffers, old in before:
            buffers.update(old)


def _is_activation(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter)


def _position(tensor: torch.Tensor, outputs: list[tuple[Any, int]]) -> int | None:
    """Which of the outputs it is, as it was made: code in between may have changed it in place."""
    now = _version(tensor)
    same = (i for i, (output, then) in enumerate(outputs) if output is tensor and then == now)
    return next(same, None)


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else 0


def _holders(generator: Any) -> list[Any]:
    """What autograd holds in the place of each saved tensor of a run, in saving order."""
    references = generator.gi_frame.f_locals["new_frame"].weak_holders
    return [reference() for reference in references]


def _start(replay: Any, tensors: list[torch.Tensor]) -> Any:
    options = (replay if name == "fn" else _OPTIONS[name] for name in _ORDER)
    return _GENERATOR(*options, *tensors)
