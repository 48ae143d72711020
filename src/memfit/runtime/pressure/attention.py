"""How closely a valve looks: at every saved tensor, or at calls of modules while it may doze.

Hooks that do nothing cost the host a microsecond and more for each saved tensor. So a valve that
saw memory far from short in a whole step takes its hooks away. Then it looks at the memory in use
when modules are called: after so many bytes went into them that there could be too little room, and
after some milliseconds, more of them the more room there is. Calls that could not fill the room if
each got as much as the largest so far are left out, 32 at most, once some steps were seen. When it
finds too much in use it sets its hooks again, in the middle of the forward, and takes in what the
graph of this forward saved until then, the longest idle first.

Hooks belong to a thread. A forward in another one than the valve's is warned of where calls of
modules show it: while the valve dozes, and before it was told of a first saved tensor.

Limits. A valve that dozes does not see what is allocated between calls of modules or in a backward:
between the memory at which it wakes and the threshold there must be room for that. What was saved
before it woke can move only if the input of the module that is called depends on it. It wakes
outside of the hooks of others (activation checkpointing, torch.func), which come first anyway.
Memory that other processes take is seen a second later. It never dozes on the CPU, where saved
tensors are counted one by one, before a tensor was saved that is large enough, or in Python 3.11
where someone else has replaced Module.__call__.
"""

from __future__ import annotations

import logging
import os
import threading
import time

import torch
from torch.autograd.graph import saved_tensors_hooks

from memfit.errors import UsageError
from memfit.runtime.pressure.aside import remove_hooks, set_hooks
from memfit.runtime.pressure.innards import hooks_are_allowed, hooks_in_force, is_in_backward
from memfit.runtime.pressure.module_calls import ModuleCalls
from memfit.runtime.pressure.saved_tensors import SavedTensors

log = logging.getLogger(__name__)

_LOOK_S = 0.002  # between two looks, which take some ten microseconds on CUDA,
_PATIENCE = 10  # times as long if all memory were free
_LEFT_OUT = 32  # calls in a row that are not looked at,
_SEEN = 16  # and one at most for so many that were: those of some steps, to know the largest
_SHARE = 16  # a module may allocate so many times what goes into it
_CAPACITY_S = 1.0  # asking the driver takes too long for every step


class Attention:
    """Sets hooks for saved tensors, and takes them away while calls of modules are enough."""

    def __init__(self, saved_tensors: SavedTensors) -> None:
        self._saved_tensors = saved_tensors
        self._calls = ModuleCalls()
        self._hooks: saved_tensors_hooks | None = None
        self._beneath: object = None  # the hooks that were in force before
        self._process = self._thread = 0
        self._dozes = self._told = self._warned = False
        self._look_at = self._ask_again_at = 0.0
        self._bytes_left = self._largest = self._seen = 0

    @property
    def dozes(self) -> bool:
        """Whether there are no hooks."""
        return self._dozes

    def begin(self) -> None:
        """Look as closely as when it ended."""
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._beneath = hooks_in_force()
        self._saved_tensors.when_asked = self._consider
        if not (self._dozes and self._watch()):
            if not hooks_are_allowed():
                raise UsageError(
                    "a valve cannot look at saved tensors here: torch.func.grad and its kin, or "
                    "torch.autograd.graph.disable_saved_tensors_hooks, forbid hooks for them",
                    hint="enter memfit.pressure around the whole loop, which may call torch.func",
                )
            self._wake()
            if not self._told:
                self._saved_tensors.when_told = self._begin_to_trust
                self._calls.start(self._called_elsewhere)

    def end(self) -> None:
        """Look no more."""
        self._saved_tensors.when_asked = self._saved_tensors.when_told = None
        self._calls.stop()
        if self._hooks is not None:
            remove_hooks(self._hooks)
            self._hooks = None

    def _wake(self) -> None:
        self._read_capacity()
        hooks = saved_tensors_hooks(self._saved_tensors.pack, self._saved_tensors.unpack)
        set_hooks(hooks)
        self._hooks, self._dozes = hooks, False

    def _read_capacity(self) -> None:
        self._saved_tensors.read_capacity()
        self._ask_again_at = time.monotonic() + _CAPACITY_S

    def _consider(self) -> None:
        """Doze from now on if all went well; called by the hooks."""
        if not self._in_forward():
            return  # something is computed again
        self._calls.stop()  # there is nothing left to take in
        if self._saved_tensors.is_quiet() and self._watch():
            assert self._hooks is not None
            remove_hooks(self._hooks)
            self._hooks, self._dozes = None, True

    def _begin_to_trust(self) -> None:
        """A first tensor is saved in the valve's thread: that is where forwards run."""
        self._told, self._saved_tensors.when_told = True, None
        self._calls.stop()

    def _watch(self) -> bool:
        self._look_at = 0.0
        return self._calls.start(self._called)

    def _called(self, value: object) -> tuple[int, float]:
        """A module is called with a value; how many calls after it do not matter, and how long."""
        if type(value) is torch.Tensor:
            size = value.nbytes
            self._largest = max(self._largest, size)
            self._bytes_left -= size
        self._seen += 1
        if self._bytes_left < 0 or time.monotonic() >= self._look_at:
            self._look(value)
        if self._bytes_left < self._largest or not self._largest or self._hooks is not None:
            return 0, 0.0
        leave_out = min(_LEFT_OUT, self._seen // _SEEN, self._bytes_left // self._largest)
        self._bytes_left -= leave_out * self._largest
        return leave_out, self._look_at

    def _look(self, value: object) -> None:
        if not self._in_forward():
            self._called_elsewhere(value)
            return
        if not hooks_are_allowed():
            return  # with the next call
        if self._hooks is None:
            if hooks_in_force() != self._beneath:
                return  # likewise
            if time.monotonic() > self._ask_again_at:
                self._read_capacity()
            room = self._saved_tensors.room()
            if room > 0:
                share = room / self._saved_tensors.capacity
                self._look_at = time.monotonic() + _LOOK_S * max(1.0, share * _PATIENCE)
                self._bytes_left = room // _SHARE
                return
            self._wake()
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            self._calls.stop()
            self._saved_tensors.adopt(value.grad_fn)

    def _called_elsewhere(self, value: object) -> tuple[int, float]:
        """Warn once where a graph grows in another thread of this process, outside a backward."""
        if (
            not self._warned
            and threading.get_ident() != self._thread
            and os.getpid() == self._process
            and isinstance(value, torch.Tensor)
            and value.grad_fn is not None
            and not is_in_backward()
        ):
            self._warned = True
            log.warning(
                "a forward runs in thread %r, and what it saves stays on the device: a valve sees "
                "only what is saved in the thread that entered it\n"
                "hint: enter memfit.pressure in the thread that runs the forward",
                threading.current_thread().name,
            )
        return 0, 0.0

    def _in_forward(self) -> bool:
        """Whether this is the loop's thread: neither a backward nor a process forked from it.

        Modules are called in the workers of a data loader, too.
        """
        here = threading.get_ident() == self._thread and os.getpid() == self._process
        return here and not is_in_backward()
