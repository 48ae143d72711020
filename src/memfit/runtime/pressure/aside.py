"""Where torch forbids hooks for saved tensors (torch.func.grad and its kin), a valve steps aside.

torch refuses to forbid hooks while some are set, by an error that a valve would bring into a loop
that works without it. So while a valve has hooks, functions stand in the places of the two that
forbid and allow hooks: they take the valve's away and set them again. What is saved meanwhile stays
on the device. Hooks of others are left alone: with them torch refuses as it does without a valve.

They stand in torch._C._autograd, not in torch.autograd.graph: torch.compile takes another
`disable_saved_tensors_hooks` there for other code. It is private, and touched in innards.py.
"""

from __future__ import annotations

import threading
from typing import Any

from torch.autograd.graph import saved_tensors_hooks

from memfit.runtime.pressure.innards import AllowedHooks, hooks_in_force
from memfit.runtime.swap.hooks import look_through, look_through_none

_hooks: saved_tensors_hooks | None = None  # of the valve at work; there is one in a process
_aside = threading.local()  # `.hooks`: those that this thread took away
_allowed = AllowedHooks()


def set_hooks(hooks: saved_tensors_hooks) -> None:
    """Set hooks that step aside where torch forbids any, and that a plan looks through."""
    global _hooks
    look_through((hooks.pack_hook, hooks.unpack_hook))
    hooks.__enter__()
    _hooks = hooks
    _allowed.replace(_forbid, _allow)


def remove_hooks(hooks: saved_tensors_hooks) -> None:
    """Take them away again."""
    global _hooks
    _allowed.restore()
    _hooks = None
    hooks.__exit__()
    look_through_none()


def _forbid(message: str, *options: Any, **named: Any) -> None:
    """Forbid hooks in this thread, without those of a valve. Options: torch's own."""
    hooks = _hooks
    if options or named or hooks is None:
        return _allowed.forbid(message, *options, **named)
    if hooks_in_force() != (hooks.pack_hook, hooks.unpack_hook):
        return _allowed.forbid(message)
    hooks.__exit__()
    try:
        _allowed.forbid(message)
    except BaseException:
        _allowed.allow()  # others' lie beneath: torch says so after it has forbidden hooks
        hooks.__enter__()
        raise
    _aside.hooks = hooks


def _allow() -> None:
    """Allow hooks in this thread, and set those that stepped aside."""
    _allowed.allow()
    hooks = getattr(_aside, "hooks", None)
    if hooks is not None:
        _aside.hooks = None
        hooks.__enter__()
