"""A plan from the lean end: let as many calls as fit run by a faster variant, kind by kind.

The solver may find nothing in time where a budget is tight, and it sees live bytes only, not where
the allocator places them. Here every step is checked by whoever asks. Limits: of calls that are
alike, the first or the last ones get the variant; what is best of that is not proven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from memfit.planning.acts import Act, Pick, calls_of
from memfit.planning.simulate import Simulator

LEVELS = 5  # changes for the calls of one kind

Fits = Callable[[Sequence[Act]], bool]


def fill_up(simulator: Simulator, acts: Sequence[Act], fits: Fits, room: int) -> tuple[Act, ...]:
    """`acts`, which fit, with faster variants for the calls where they fit as well.

    `room` is the peak of live bytes that is likely to fit: a guess that saves asking.
    """
    for graph in range(len(simulator.profile.graphs)):
        for _ in range(LEVELS):
            better = _best_level(simulator, acts, graph, fits, room)
            if better is None:
                break
            acts = better
    return tuple(acts)


def _best_level(
    simulator: Simulator, acts: Sequence[Act], graph: int, fits: Fits, room: int
) -> tuple[Act, ...] | None:
    """The acts after the one change that saves most; None when none saves anything."""
    picked = {act.call: simulator.seconds_of(act) for act in acts if isinstance(act, Pick)}
    calls = [c.index for c in simulator.graph.calls if c.graph == graph and c.need >= 0]

    def likely(found: Sequence[Act]) -> bool:
        return simulator.peak_bytes(found) <= room

    levels = []
    for variant in range(1, len(simulator.menus[graph])):
        picks = [Pick(call, variant) for call in calls]
        slower = [
            pick.call
            for pick in picks
            if simulator.seconds_of(pick) < picked.get(pick.call, float("inf"))
            and simulator.may(pick)
        ]
        for order in (slower, slower[::-1]):
            taken = _most(acts, order, variant, likely)
            if taken:
                given = _given(acts, taken, variant)
                levels.append((simulator.step_seconds(given), taken, variant))
    for seconds, order, variant in sorted(levels, key=lambda level: level[0]):
        if seconds >= simulator.step_seconds(acts):
            return None
        taken = _most(acts, order, variant, fits)
        if taken:
            return _given(acts, taken, variant)
    return None


def _most(acts: Sequence[Act], calls: list[int], variant: int, fits: Fits) -> list[int]:
    """The most of the calls, in order, that fit; more of them are taken never to fit better."""
    low, high = 0, len(calls) + 1
    tried = len(calls)  # all of them, if that is possible
    while high - low > 1:
        fitting = fits(_given(acts, calls[:tried], variant))
        low, high = (tried, high) if fitting else (low, tried)
        tried = (low + high) // 2
    return calls[:low]


def _given(acts: Sequence[Act], calls: Iterable[int], variant: int) -> tuple[Act, ...]:
    """The acts with this variant for these calls, taken out of the runs they were in."""
    chosen = set(calls)
    left = [part for act in acts for part in _without(act, chosen)]
    found: list[Act] = [*left, *(Pick(call, variant) for call in chosen)]
    return tuple(sorted(found, key=lambda act: calls_of(act)[0]))


def _without(act: Act, calls: set[int]) -> Iterator[Act]:
    """What is left of an act without these calls: runs may fall into several."""
    if not isinstance(act, tuple):
        if act.call not in calls:
            yield act
        return
    first = act[0]
    for call in [*(c for c in range(act[0], act[1] + 1) if c in calls), act[1] + 1]:
        if call > first:
            yield (first, call - 1)
        first = call + 1
