"""Choices that hold a budget where the allocator places them, not by their live bytes alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from memfit.planning.acts import Act
from memfit.planning.fill_up import fill_up
from memfit.planning.request import Choice, Request
from memfit.planning.reserved import reserved_bytes
from memfit.planning.simulate import Simulator

MAX_TIGHTENINGS = 24
# Of the time that a request allows, for one of them and for all; the last may begin just before.
TIGHTENING, TIGHTENINGS = 3 / 8, 3 / 4

Asked = Callable[[Request], Sequence[Choice]]  # the choices for a request, none if nothing fits


def held_bytes(simulator: Simulator, acts: Sequence[Act], trim: bool = False) -> int:
    """What a budget must cover: the allocator's bytes where they are predicted, else live ones."""
    return known_held_bytes(simulator, tuple(acts), trim)


def holds(simulator: Simulator, choice: Choice, target: int | None) -> bool:
    """Whether a choice stays within the target, the allocator's placement included."""
    return target is None or held_bytes(simulator, choice.acts, choice.trim) <= target


def seconds(simulator: Simulator, choice: Choice) -> float:
    """Seconds of the step by a choice, giving pages back included."""
    return simulator.step_seconds(choice.acts) + choice.trim * simulator.profile.trim_s


def tightened(
    simulator: Simulator,
    ask: Asked,
    request: Request,
    choices: Sequence[Choice],
    each: float = TIGHTENING,
) -> list[Choice]:
    """Ask for less until the allocator, too, stays under the budget, then for as much as it can.

    All choices that were found, whether they hold or not; `each` is the share of the time that one
    may take.

    `choices` are those for the budget itself. How well a choice is placed goes up and down: between
    the budget and what holds, the search comes down from above by small steps. What was proven for
    the budget stays the bound; for less than it, more could be proven.
    """
    target, first = request.budget, choices[0]
    assert target is not None
    known, tries = list(choices), iter(range(MAX_TIGHTENINGS))
    one_s = each * request.time_limit_s
    # Other processes may be busy.
    deadline = time.process_time() + TIGHTENINGS * request.time_limit_s

    def over(asked: int) -> int | None:
        """By how much choices for so many bytes miss the target; None if there are none."""
        if time.process_time() > deadline or next(tries, None) is None:
            return None
        found = ask(replace(request, budget=asked, time_limit_s=one_s))
        known.extend(
            replace(option, trim=first.trim, lower_bound_s=first.lower_bound_s) for option in found
        )
        return _over(simulator, known[-len(found) :], target) if found else None

    top, missed = min(target, simulator.peak_bytes(first.acts)), _over(simulator, choices, target)
    step = max(target // 400, 2)
    holding = top
    more: int | None = missed
    while more is not None and more > 0:
        holding -= max(more, step)
        more = over(holding)
    asked = top - max(missed, 0) // 2
    while more is not None and asked > holding and (above := over(asked)) is not None and above > 0:
        asked -= max(above // 2, step // 2)
    return known


def fastest_holding(
    simulator: Simulator, choices: Iterable[Choice], target: int | None
) -> Choice | None:
    """The fastest of the choices that hold; None when none does."""
    holding = [choice for choice in choices if holds(simulator, choice, target)]
    return min(holding, key=lambda choice: seconds(simulator, choice), default=None)


def filled_up(
    simulator: Simulator, lean: Choice, target: int, host_bytes: int | None = None
) -> Choice:
    """A choice that holds, made faster as far as it holds where the allocator places it."""

    def fits(acts: Sequence[Act]) -> bool:
        fits_host = simulator.fits_host(acts, host_bytes)
        return fits_host and holds(simulator, replace(lean, acts=tuple(acts)), target)

    gap = _over(simulator, [lean], simulator.peak_bytes(lean.acts))
    return replace(lean, acts=fill_up(simulator, lean.acts, fits, target - gap))


@lru_cache(maxsize=512)
def known_held_bytes(simulator: Simulator, acts: tuple[Act, ...], trim: bool) -> int:
    """As `held_bytes`: placing a step takes too long to do it twice."""
    return max(reserved_bytes(simulator, acts, trim) or 0, simulator.peak_bytes(acts))


def _over(simulator: Simulator, choices: Sequence[Choice], target: int) -> int:
    """By how much the one that is placed best misses the target."""
    return min(held_bytes(simulator, found.acts, found.trim) for found in choices) - target
