"""The random numbers of Python and numpy, which a model's own code may draw from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

HostState = tuple[Any, ...]


def host_state() -> HostState:
    """The states of Python's and numpy's generators, which compare as values."""
    state: Any = np.random.get_state()
    kind, keys, *rest = state
    return random.getstate(), kind, keys.tobytes(), *rest


def set_host_state(state: HostState) -> None:
    """Set both generators to what `host_state` gave."""
    python, kind, keys, *rest = state
    random.setstate(python)
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
