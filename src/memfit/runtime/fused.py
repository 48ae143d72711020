"""Arithmetic on tensors as it stands, or compiled into few kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

Run = Callable[..., Any]  # a function, then its inputs

_UNLIMITED = 1_000_000
# Past its limits dynamo runs code eagerly without a word; here only errors stop it.
_DYNAMO_SETTINGS = {
    "recompile_limit": _UNLIMITED,
    "accumulated_recompile_limit": _UNLIMITED,
    "suppress_errors": False,
}


@contextmanager
def runner(compiled: bool, *, dynamic: bool = False) -> Iterator[Run]:
    """Runs functions as they are, or compiled: for each shape they meet, or once for all of them.

    Entered once for many calls: settings of dynamo take the host longer to set than a kernel.
    """
    if not compiled:
        yield as_it_is
        return
    from torch._dynamo import config  # loads dynamo, which takes seconds

    with config.patch(_DYNAMO_SETTINGS):
        yield lambda function, *inputs: _compiled(function, dynamic)(*inputs)


def as_it_is(function: Callable[..., Any], *inputs: Any) -> Any:
    """Run a function and compile nothing."""
    return function(*inputs)


@cache
def _compiled(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    return torch.compile(function, dynamic=dynamic, fullgraph=True)
