"""A choice that misses the budget where the allocator places it, changed until it holds.

The solver sees live bytes only, and asking it for less gives up much where few bytes are missing.
Choices that differ by one act may be placed by a tenth apart: here single changes are made, each
time the one that wins most bytes per second. Limits: what is best is not proven, and two changes
that only help together are not found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from memfit.planning.acts import Act
from memfit.planning.improve import Acts, changes, costs
from memfit.planning.simulate import Simulator

MAX_CHANGES = 12

Held = Callable[[Sequence[Act]], int]  # the bytes that a budget must cover


def mended(
    simulator: Simulator,
    acts: Sequence[Act],
    candidates: Sequence[Act],
    held: Held,
    budget: int,
    tries: Iterator[object],
    enough_s: float = math.inf,
) -> Acts | None:
    """`acts` after changes by `candidates` that make them hold; None where none were found.

    Each look at what is held takes one of the `tries`. A step of `enough_s` seconds or more is no
    use: another that holds is known.
    """
    at_most_s = costs(simulator, candidates)
    now, now_bytes, now_s = tuple(acts), held(acts), simulator.step_seconds(acts)
    for _ in range(MAX_CHANGES):
        best: tuple[float, Acts, int] | None = None
        for change in changes(simulator, now, at_most_s):
            changed = change.of(now) if change.won_s <= 0 else None  # what is faster takes more
            if changed is None or simulator.peak_bytes(changed) > budget:
                continue
            if (changed_s := simulator.step_seconds(changed)) >= enough_s:
                continue  # and further changes make it slower
            if next(tries, None) is None:
                return None
            if (size := held(changed)) <= budget:
                return changed
            rate = (now_bytes - size) / max(changed_s - now_s, 1e-9)
            if rate > 0 and (best is None or rate > best[0]):
                best = rate, changed, size
        if best is None:
            return None
        _, now, now_bytes = best
        now_s = simulator.step_seconds(now)
    return None
