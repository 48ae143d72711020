"""A choice that misses the budget where the allocator places it, changed until it holds.

The solver sees live bytes only, and asking it for less gives up much where few bytes are missing.
Choices that differ by one act may be placed by a tenth apart: here single changes are made, each
time the one that wins most bytes per second. Limits: what is best is not proven, and two changes
that only help together are not found.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from memfit.planning import optimal
from memfit.planning.acts import Act, calls_of
from memfit.planning.improve import Acts, changes, costs
from memfit.planning.placed import fastest_holding, held_bytes, holds, seconds
from memfit.planning.request import Choice
from memfit.planning.simulate import Simulator

MAX_CHANGES = 12
NEAREST = 3  # choices that miss by least are mended
MAX_LOOKS = 60  # at placements, for all of them
NO_BUDGET = sys.maxsize  # covers what the host has no room for

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


def nearest_mended(
    simulator: Simulator,
    known: Sequence[Choice],
    budget: int,
    *,
    trim: bool,
    host_bytes: int | None = None,
) -> list[Choice]:
    """Of choices that are `known` those that miss the budget by least, mended; to `trim` or not."""

    def held(acts: Sequence[Act]) -> int:
        fits_host = simulator.fits_host(acts, host_bytes)
        return held_bytes(simulator, acts, trim) if fits_host else NO_BUDGET

    best = fastest_holding(simulator, known, budget)
    enough_s = math.inf if best is None else seconds(simulator, best)
    missing = {
        choice.acts: choice
        for choice in known
        if not holds(simulator, choice, budget) and seconds(simulator, choice) < enough_s
    }
    single = [act for act in optimal.candidates(simulator) if len(calls_of(act)) == 1]
    tries = iter(range(MAX_LOOKS))
    found: list[Choice] = []
    for acts in sorted(missing, key=held)[:NEAREST]:
        changed = mended(simulator, acts, single, held, budget, tries, enough_s)
        if changed is not None:
            found.append(replace(missing[acts], acts=changed, trim=trim))
    return found
