"""What a strategy is asked for, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.planning.acts import Act
from memfit.planning.simulate import Simulator


@dataclass(frozen=True)
class Request:
    """What a strategy is asked for. `budget` None: it may do as it pleases."""

    budget: int | None
    max_seconds: float  # of recompute
    interval: int | None = None
    time_limit_s: float = 8.0
    host_bytes: int | None = None  # at most so many may wait on the host


@dataclass(frozen=True)
class Choice:
    """Chosen acts and, where a strategy proves one, the fewest seconds any plan needs."""

    acts: tuple[Act, ...]
    lower_bound_s: float = 0.0
    note: str | None = None
    trim: bool = False


Strategy = Callable[[Simulator, Request], Choice | None]
