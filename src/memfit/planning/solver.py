"""HiGHS through scipy, kept from printing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scipy.optimize import milp


def solve_milp(*args: Any, **options: Any) -> Any:
    """The answer of `scipy.optimize.milp`, which is given all arguments."""
    with _silenced():
        return milp(*args, **options)


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
