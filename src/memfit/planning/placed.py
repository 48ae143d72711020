"""Choices that hold a budget where the allocator places them, not by their live bytes alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from memfit.planning.acts import Act
from memfit.planning.fill_up import fill_up
from memfit.planning.request import Choice, Request, Strategy
from memfit.planning.reserved import reserved_bytes
from memfit.planning.simulate import Simulator

MAX_TIGHTENINGS = 10
TIGHTENING_S = 1.5  # for one of them
TIGHTENINGS_S = 3.0  # for all; the last may begin just before


def held_bytes(simulator: Simulator, acts: Sequence[Act], trim: bool = False) -> int:
    """What a budget must cover: the allocator's bytes where they are predicted, else live ones."""
    return max(reserved_bytes(simulator, acts, trim) or 0, simulator.peak_bytes(acts))


def holds(simulator: Simulator, choice: Choice, target: int | None) -> bool:
    """Whether a choice stays within the target, the allocator's placement included."""
    return target is None or held_bytes(simulator, choice.acts, choice.trim) <= target


def seconds(simulator: Simulator, choice: Choice) -> float:
    """Seconds of the step by a choice, giving pages back included."""
    return simulator.step_seconds(choice.acts) + choice.trim * simulator.profile.trim_s


def tightened(simulator: Simulator, strategy: Strategy, request: Request, choice: Choice) -> Choice:
    """Ask for less until the allocator, too, stays under the budget, then for as much as it can.

    What was proven for the budget stays the bound; for less than it, more could be proven.
    """
    target = request.budget
    assert target is not None
    too_much = min(target, simulator.peak_bytes(choice.acts))
    asked, holding = too_much - _over(simulator, choice, target), 0
    known = [choice]
    deadline = time.monotonic() + TIGHTENINGS_S
    for _ in range(MAX_TIGHTENINGS):
        if time.monotonic() > deadline:
            break
        found = strategy(simulator, replace(request, budget=asked, time_limit_s=TIGHTENING_S))
        if found is None:
            break
        found = replace(found, trim=choice.trim, lower_bound_s=choice.lower_bound_s)
        known.append(found)
        over = _over(simulator, found, target)
        if over <= 0:
            holding = asked
        else:
            too_much = asked
        if too_much - holding <= target // 400:
            break
        asked = (holding + too_much) // 2 if holding else asked - max(over, target // 400)
    fitting = [found for found in known if holds(simulator, found, target)]
    return min(fitting, key=lambda found: seconds(simulator, found), default=choice)


def filled_up(simulator: Simulator, lean: Choice, target: int) -> Choice:
    """A choice that holds, made faster as far as it holds where the allocator places it."""

    def fits(acts: Sequence[Act]) -> bool:
        return holds(simulator, replace(lean, acts=tuple(acts)), target)

    gap = _over(simulator, lean, simulator.peak_bytes(lean.acts))
    return replace(lean, acts=fill_up(simulator, lean.acts, fits, target - gap))


def _over(simulator: Simulator, choice: Choice, target: int) -> int:
    return held_bytes(simulator, choice.acts, choice.trim) - target
