"""HiGHS through scipy, kept from printing, with the seconds of work it was given.

Its time limit is of the wall clock: of a process that others keep waiting, it is over before
anything was done. Such a program is solved again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scipy.optimize import milp

STARVED = 0.5  # of its seconds: a solver that worked for less was kept waiting
MORE_TRIES = 2


def solve_milp(*args: Any, options: dict[str, Any], **more: Any) -> Any:
    """The answer of `scipy.optimize.milp`, which is given all arguments."""
    limit_s = options["time_limit"]
    for tries_left in range(MORE_TRIES, -1, -1):
        begun, begun_cpu = time.monotonic(), time.process_time()
        with _silenced():
            result = milp(*args, options=options, **more)
        stopped = time.monotonic() - begun >= limit_s
        if not stopped or time.process_time() - begun_cpu >= STARVED * limit_s or not tries_left:
            break
    return result


@contextmanager
def _silenced() -> Iterator[None]:
    """Drop what the solver's own code prints past its log settings: leftovers of debugging."""
    try:
        stdout = os.dup(1)
    except OSError:  # no stdout, nothing to protect
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)
