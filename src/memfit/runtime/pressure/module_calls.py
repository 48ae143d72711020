"""Calls of modules, seen from outside: nothing is hung on a model, and torch's hooks stay empty.

Hooks on all modules (torch.nn.modules.module.register_module_forward_pre_hook) would take 2 us a
call, and torch.compile warns of them. sys.monitoring takes 0.1 us, and 0.5 us with the argument,
so whoever is told says how many calls it need not hear of. Where Python has none (3.11), or others
use all of its places, a function takes the place of Module.__call__, which takes 0.5 us a call.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.compiler import is_compiling

_MONITORING: Any = getattr(sys, "monitoring", None)  # Python 3.12
_IDS = (3, 4)  # those that Python gives no meaning to
_NAME = "memfit.pressure"

# Told of an argument; how many calls to leave out after it, and until when (time.monotonic).
Seen = Callable[[object], tuple[int, float]]
Stop = Callable[[], None]


class ModuleCalls:
    """Tells of every call of a module, in any thread, with its first positional argument."""

    def __init__(self) -> None:
        self._stop: Stop | None = None

    def start(self, seen: Seen) -> bool:
        """Tell `seen` from now on; False where others leave no place for that."""
        assert self._stop is None
        self._stop = _monitored(seen) or _replaced(seen)
        return self._stop is not None

    def stop(self) -> None:
        """Tell nobody any more."""
        if self._stop is not None:
            stop, self._stop = self._stop, None
            stop()


def _monitored(seen: Seen) -> Stop | None:
    """By sys.monitoring; None where there is none, or no place in it."""
    code = getattr(nn.Module.__call__, "__code__", None)
    free = [n for n in _IDS if _MONITORING is not None and _MONITORING.get_tool(n) is None]
    if code is None or not free:
        return None
    tool, event = free[0], _MONITORING.events.PY_START
    frame_of = sys._getframe
    left_out, until, clock = 0, 0.0, time.monotonic

    def called(code: Any, offset: int) -> None:
        nonlocal left_out, until
        if left_out > 0 and clock() < until:
            left_out -= 1
            return
        # Its frame is the one that was just entered: Module.__call__(self, *args, **kwargs).
        args = frame_of(1).f_locals.get("args")
        left_out, until = seen(args[0] if args else None)

    def stop() -> None:
        _MONITORING.set_local_events(tool, code, 0)
        _MONITORING.register_callback(tool, event, None)
        _MONITORING.free_tool_id(tool)

    _MONITORING.use_tool_id(tool, _NAME)
    _MONITORING.register_callback(tool, event, called)
    _MONITORING.set_local_events(tool, code, event)
    return stop


_original = nn.Module.__call__


class _Told:
    """Whom the function in the place of Module.__call__ tells, and of which calls it does not."""

    seen: Seen | None = None
    left_out, until = 0, 0.0


@functools.wraps(_original)
def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """One and the same function each time: torch.compile takes another one for other code."""
    if is_compiling():  # what is compiled is not told of
        return _original(self, *args, **kwargs)
    if _Told.left_out > 0 and time.monotonic() < _Told.until:
        _Told.left_out -= 1
    elif _Told.seen is not None:
        _Told.left_out, _Told.until = _Told.seen(args[0] if args else None)
    return _original(self, *args, **kwargs)


def _replaced(seen: Seen) -> Stop | None:
    """By a function in the place of Module.__call__; None where others have put theirs there."""
    if nn.Module.__call__ not in (_original, _call):
        return None

    def stop() -> None:
        _Told.seen, _Told.left_out = None, 0
        if nn.Module.__call__ is _call:  # else another one was put there, which may call this one
            nn.Module.__call__ = _original  # type: ignore[method-assign]

    _Told.seen = seen
    nn.Module.__call__ = _call  # type: ignore[method-assign]
    return stop
