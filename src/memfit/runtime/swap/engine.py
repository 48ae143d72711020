"""The engine that takes saved tensors to host memory after a call's forward and brings them back.

It works around every executor, through torch's hooks for saved tensors. A call's memory starts to
leave when autograd saves it; the points at which it is let go and fetched again are the plan's.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.errors import HostMemoryError, UsageError
from memfit.ir.swap import SwapStatistics
from memfit.runtime.calls import Engine, Forward
from memfit.runtime.compile.compiled import CompiledSegments
from memfit.runtime.swap.arena import Arena
from memfit.runtime.swap.hooks import hooks_but_a_valves, top_hooks
from memfit.runtime.swap.lanes import Lanes
from memfit.runtime.swap.moved import Counter, Handle, Kept, Moved
from memfit.runtime.swap.mover import Mover
from memfit.runtime.swap.schedule import Step
from memfit.runtime.swap.storages import StorageSet, has_storage, may_move
from memfit.units import format_bytes

log = logging.getLogger(__name__)

_LONGEST_PAUSE = 63  # steps
_OLDER_GRAPH = (
    "the graph of an older step is still alive (its loss or outputs, a kept exception); let go of "
    "it before the next forward"
)
_MORE_SAVED = "the step saves more than was planned for (a larger batch?); plan for its batch"
Packed = Handle | Kept


@dataclass(frozen=True)
class CallMoves:
    """What one call moves, and when.

    `names` are nodes of its joint graph, None all that it saves; storages under `smallest` bytes
    stay. The memory is let go when the forward of call `release` starts and copied back from when
    the backward of call `prefetch` starts; the number of calls stands for the end of the forward.
    """

    names: frozenset[str] | None
    smallest: int
    release: int
    prefetch: int


class Swap:
    """Runs calls through another engine and moves what they save.

    `static` are tensors or storages that never move. The arena stays its maker's to close.

    What the arena has no room for stays on the device. Memory lives as long as the graph that
    saved it, in later steps and when swapping is off, too. It is given up sooner in three cases
    only: an exception left the model's forward; a backward that had come to the step's memory
    failed, and another step begins; an exception left a block of `owned`. To ask for it then is a
    UsageError.
    """

    def __init__(
        self,
        inner: Engine,
        moves: Mapping[int, CallMoves],
        num_calls: int,
        arena: Arena,
        lanes: Lanes,
        static: Collection[torch.Tensor | torch.UntypedStorage] = (),
        compiled: CompiledSegments | None = None,
    ) -> None:
        named = [index for index, move in moves.items() if move.names is not None]
        assert compiled is not None or not named, "names belong to compiled calls"
        self._inner, self._moves, self._num_calls = inner, dict(moves), num_calls
        self._mover, self._compiled = Mover(arena, lanes), compiled
        self._static = StorageSet(static)
        self._given = StorageSet()  # batches: few, so that the dead among them are quickly found
        self._points = {move.prefetch for move in self._moves.values()}
        self._step = Step()
        self._older: list[Step] = []  # steps whose graphs are still alive
        self._thread: int | None = None  # that of the forward under way
        self._running: int | None = None  # the call under way
        self._last = -1  # the latest call
        self._bare = False  # whether the step began with a call, not with the model
        self._called = False  # whether a call has come since the step began
        self._outside: Any = None  # hooks that were there before the step, but for a valve's
        self._checkpointed = False  # whether a checkpoint's are around all of it
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks] = []
        self._begun = 0  # steps; the counts of the statistics begin anew
        self._collects_from = self._pause = 0
        self._steps = self._no_room = 0
        self._said: set[str] = set()  # warnings

    @property
    def replaying(self) -> bool:
        """Whether the inner engine repeats a forward."""
        return self._inner.replaying

    def keep(self, inputs: Any) -> None:
        """Let the tensors in here (a batch) never move, as long as they live: others hold them."""
        leaves = tree_leaves(inputs)
        self._given.update(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def begin(self) -> None:
        """Start a step. What a backward that failed has left is given up.

        Within the handling of an exception that ended a forward, so is what that has left.
        """
        here = threading.get_ident()
        if self._under_way and self._thread != here:
            raise _two_threads()
        self._inner.begin()
        self._close_hooks()
        assert not self._hooks, "hooks for saved tensors were left open inside a forward"
        self._put_aside()
        self._step = Step()
        self._begun += 1
        self._mover.arena.collects = self._begun >= self._collects_from
        self._thread, self._running, self._called, self._bare = here, None, False, False
        self._outside = hooks_but_a_valves()
        self._checkpointed = _is_checkpoint(top_hooks())

    def end(self) -> None:
        """The model's forward is over: all memory that is to go, goes."""
        self._release(self._num_calls)
        self._step.complete = True
        self._steps += torch.is_grad_enabled() and not _in_backward()
        self._thread = None
        self._inner.end()
        self._prefetch(self._step, self._num_calls)

    def __call__(self, index: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or _in_backward():
            return self._inner(index, forward, args, kwargs)
        self._enter(index)
        try:
            self._release(index)
            output = self._run(index, forward, args, kwargs)
        finally:
            self._running = None
        if index in self._points or index == self._num_calls - 1:
            self._announce(index, output)
        if self._bare and index == self._num_calls - 1:
            self.end()
        return output

    def statistics(self) -> SwapStatistics:
        """What was moved since the last reset; waits for copies under way."""
        mover = self._mover
        out, back = mover.traffic()
        return SwapStatistics(
            steps=self._steps,
            moves=mover.moves,
            retrievals=mover.retrievals,
            late=mover.late,
            stayed=mover.stayed + self._no_room,
            out=out,
            back=back,
            host_bytes=mover.arena.capacity_bytes,
            host_highest_bytes=mover.arena.highest_bytes,
        )

    @property
    def copies_in_flight(self) -> int:
        """Copies in both directions that were started and are not over."""
        return self._mover.in_flight()

    def reset_statistics(self) -> None:
        """Count from zero again."""
        self._mover.reset()
        self._steps = self._no_room = 0

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Within it every step is the caller's: an exception gives up those that began here."""
        before = (*self._older, self._step)
        try:
            yield
        except BaseException:
            self._thread = None
            for step in (*self._older, self._step):
                if step not in before:
                    self._mover.drop(step.living())
            raise

    def close(self) -> None:
        """Wait for the copies; harmless when done twice. Graphs that are alive keep their memory,
        but for those of a backward that failed."""
        self._thread = None
        self._put_aside()
        self._step = Step()
        self._mover.synchronize()

    @property
    def _under_way(self) -> bool:
        """Whether calls of a forward have come and more of them may."""
        if self._thread is None or not self._called:
            return False
        return self._running is not None or not self._bare

    def _put_aside(self) -> None:
        """Have the step make room for another one: what failed is dropped, what is alive stays.

        A backward that failed in the loss, before it came to the calls, cannot be told from one to
        come, nor can one of a part of the parameters from the first of several.
        """
        if not self._step.complete:
            if sys.exc_info()[1] is not None:
                self._mover.drop(self._step.living())
            self._release(self._num_calls)
        self._older = [step for step in (*self._older, self._step) if step.living()]
        for step in self._older:
            if step.failed:
                self._mover.drop([moved for moved in step.living() if not moved.here])
        self._mover.settle()

    def _enter(self, index: int) -> None:
        """Take note that a call begins; a loss that calls only parts of the model has no begin."""
        here = threading.get_ident()
        again = self._thread != here or (self._bare and index <= self._last)
        if again and not self._under_way:
            self.begin()
            self._bare = self._step.complete = True
        if self._thread != here:
            raise _two_threads()
        if self._running is not None:
            raise UsageError(
                f"segment call {index} began inside call {self._running}, which swaps",
                hint="segments must not contain one another: give other segments",
            )
        self._running, self._last, self._called = index, index, True

    def _run(self, index: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        moves = self._moves.get(index)
        # Hooks that came up within the step (a checkpoint, a run of the inner engine) own what
        # is saved under them. A checkpoint around the step repeats it without hooks of ours. A
        # valve comes and goes within steps: it takes what the plan leaves.
        if moves is not None and self._checkpointed:
            self._say(
                "nothing is moved to the host in a step within torch.utils.checkpoint: what that "
                "recomputes is not kept. Take it away, or let the plan recompute, too"
            )
            moves = None
        if moves is None or hooks_but_a_valves() != self._outside:
            try:
                return self._inner(index, forward, args, kwargs)
            finally:
                self._close_hooks()
        named = StorageSet()
        hooks = torch.autograd.graph.saved_tensors_hooks(partial(self._pack, moves, named), _unpack)
        hooks.__enter__()
        self._hooks.append(hooks)
        try:
            with self._watched(moves, named):
                output = self._inner(index, forward, args, kwargs)
            self._note_returned(output, named)
            return output
        finally:
            self._close_hooks()

    def _close_hooks(self) -> None:
        """Take our hooks off, unless the inner engine has left its own on top for its next call."""
        while self._hooks:
            top = top_hooks()
            if top is None or top[0] is not self._hooks[-1].pack_hook:
                return
            self._hooks.pop().__exit__(None, None, None)

    @contextmanager
    def _watched(self, moves: CallMoves, named: StorageSet) -> Iterator[None]:
        """Learn which storages the named nodes have, before autograd saves them."""
        names, compiled = moves.names, self._compiled
        if names is None or compiled is None:
            yield
            return

        def watch(node: str, tensor: torch.Tensor) -> None:
            if node in names:
                named.add(tensor)

        with compiled.watched_here(watch):
            yield

    def _pack(self, moves: CallMoves, named: StorageSet, tensor: torch.Tensor) -> Packed:
        if not may_move(tensor, self._mover.lanes.device, moves.smallest, self._static):
            return Kept(tensor)
        storage = tensor.untyped_storage()
        if storage in self._given or (moves.names is not None and storage not in named):
            return Kept(tensor)
        known = self._step.find(tensor) or self._move(tensor, moves.release)
        if known is None:
            return Kept(tensor)
        self._step.wanted(known[0], moves.prefetch)
        return Handle(*known, tensor)

    def _move(self, tensor: torch.Tensor, release: int) -> tuple[Moved, Counter] | None:
        """Start to move a tensor's memory; None where it stays, for want of host memory."""
        step, storage = self._step, tensor.untyped_storage()
        if storage in step.stays:
            return None
        size = storage.nbytes()
        if size < step.refused_bytes:
            try:
                moved = self._mover.move(tensor, step)
            except HostMemoryError:
                step.refused_bytes = size
                self._pause_collecting()
                self._say_full(size)
            else:
                step.add(moved, release)
                return moved, moved.counters[0]
        step.stays.add(storage)
        self._no_room += 1
        return None

    def _pause_collecting(self) -> None:
        """Look for no garbage in this step and in some more, more of them each time.

        That takes longer than a small step, and where graphs are kept it would be in every step.
        """
        if self._mover.arena.collects:
            self._mover.arena.collects = False
            self._pause = min(2 * self._pause + 1, _LONGEST_PAUSE)
            self._collects_from = self._begun + 1 + self._pause

    def _say_full(self, size: int) -> None:
        why = _OLDER_GRAPH if any(step.living() for step in self._older) else _MORE_SAVED
        self._say(
            f"host memory for swapping is full ({format_bytes(self._mover.arena.capacity_bytes)}): "
            f"{format_bytes(size)} and perhaps more stay on the device, and the step takes more "
            f"there than was planned. {why[0].upper()}{why[1:]}",
            why,
        )

    def _say(self, warning: str, kind: str | None = None) -> None:
        """Warn, once of a kind."""
        if (kind or warning) not in self._said:
            self._said.add(kind or warning)
            log.warning("%s", warning)

    def _note_returned(self, output: Any, named: StorageSet) -> None:
        """Find out which results of a compiled call lie in memory that it has named."""
        for leaf in tree_leaves(output) if named else ():
            if isinstance(leaf, torch.Tensor) and has_storage(leaf) and not leaf.is_inference():
                if leaf.untyped_storage() in named:
                    self._step.returned(leaf)

    def _release(self, index: int) -> None:
        due = self._step.due_releases(index)
        if due:
            self._mover.release(due)

    def _announce(self, index: int, output: Any) -> None:
        """Have the copies back begin with the backward of this call, and take note of that."""
        tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        for node in {t.grad_fn for t in tensors if t.grad_fn is not None}:
            node.register_prehook(partial(self._prefetch, self._step, index))

    def _prefetch(self, step: Step, index: int, gradients: Any = None) -> None:
        if gradients is not None:
            step.walked()
        due = step.due_prefetches(index)
        if due:
            self._mover.prefetch(due)


def _unpack(packed: Packed) -> torch.Tensor:
    return packed.tensor()


def _is_checkpoint(hooks: Any) -> bool:
    """Whether hooks are those of torch's checkpoint, which count what is saved and keep nothing."""
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def _in_backward() -> bool:
    """Whether a checkpoint of the user's repeats a forward."""
    return torch._C._current_graph_task_id() != -1


def _two_threads() -> UsageError:
    return UsageError(
        "a segment was called from another thread while a step that swaps is under way",
        hint="run the forwards of one model in one thread; give each thread a model of its own",
    )
