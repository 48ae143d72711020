"""HiGHS through scipy, made to keep its hands off stdout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scipy.optimize import milp


def solve_milp(*args: Any, **options: Any) -> Any:
    """The answer of `scipy.optimize.milp`, which is given all arguments."""
    with _output_to_stderr():
        return milp(*args, **options)


@contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Send what the solver's own code prints (rarely, past its log settings) to stderr."""
    try:
        stdout = os.dup(1)
    except OSError:  # no stdout, nothing to protect
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
