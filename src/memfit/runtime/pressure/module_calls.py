"""Calls of modules, seen from outside: nothing is hung on a model, and torch's hooks stay empty.

Hooks on all modules (torch.nn.modules.module.register_module_forward_pre_hook) would take 2 us a
call, and torch.compile warns of them. sys.monitoring takes 0.1 us, and 0.5 us with the argument,
so whoever is told says how many calls it need not hear of.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from torch import nn

_MONITORING: Any = getattr(sys, "monitoring", None)  # Python 3.12
_IDS = (3, 4)  # those that Python gives no meaning to
_NAME = "memfit.pressure"

# Told of an argument; how many calls to leave out after it, and until when (time.monotonic).
Seen = Callable[[object], tuple[int, float]]


def can_see_calls() -> bool:
    """Whether this Python can tell of calls: 3.12 and newer."""
    return _MONITORING is not None


class ModuleCalls:
    """Tells of every call of a module, in any thread, with its first positional argument."""

    def __init__(self) -> None:
        self._tool: int | None = None
        self._code: Any = None

    def start(self, seen: Seen) -> bool:
        """Tell `seen` from now on; False where this Python cannot, or others left no place."""
        assert self._tool is None
        code = getattr(nn.Module.__call__, "__code__", None)
        if not can_see_calls() or code is None:
            return False
        free = [number for number in _IDS if _MONITORING.get_tool(number) is None]
        if not free:
            return False
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

        self._tool, self._code = free[0], code
        _MONITORING.use_tool_id(self._tool, _NAME)
        _MONITORING.register_callback(self._tool, _MONITORING.events.PY_START, called)
        _MONITORING.set_local_events(self._tool, code, _MONITORING.events.PY_START)
        return True

    def stop(self) -> None:
        """Tell nobody any more."""
        if self._tool is None:
            return
        _MONITORING.set_local_events(self._tool, self._code, 0)
        _MONITORING.register_callback(self._tool, _MONITORING.events.PY_START, None)
        _MONITORING.free_tool_id(self._tool)
        self._tool = None
