"""A plan with fewer variants where that costs next to nothing: each is compiled by itself.

The program is free to give every call of a kind its own variant, and often does for a thousandth of
the step. Fused code takes seconds per variant to compile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from memfit.planning import optimal
from memfit.planning.acts import Pick
from memfit.planning.request import Choice, Request
from memfit.planning.simulate import Simulator

WORTH = 0.002  # of the step's time: seven seconds an hour, about what a variant takes to compile
MOST_KINDS = (1, 2)  # variants per kind of segment to try
TIME_LIMIT_S = 1.5

Variants = frozenset[tuple[int, int]]  # (joint graph, number in its menu)


def with_few_variants(
    simulator: Simulator,
    request: Request,
    choice: Choice,
    holds: Callable[[Choice], bool],
    seconds: Callable[[Choice], float],
) -> Choice:
    """The choice made again of its most used variants, if that holds and is hardly slower."""
    enough_s = (1 + WORTH) * seconds(choice)
    assert request.budget is not None
    peak = simulator.peak_bytes(choice.acts)  # what the allocator is known to place
    for only in _fewer(simulator, choice):
        found = optimal.fastest(
            simulator,
            min(request.budget, peak),
            time_limit_s=min(request.time_limit_s, TIME_LIMIT_S),
            host_bytes=request.host_bytes,
            only=only,
        )
        if found is None:
            continue
        again = replace(choice, acts=found.acts)
        if holds(again) and seconds(again) <= enough_s:
            return again
    return choice


def _fewer(simulator: Simulator, choice: Choice) -> list[Variants]:
    """The most used variants of each kind, the fewest first; nothing when there are few already."""
    used: dict[int, Counter[int]] = {}
    for act in choice.acts:
        if isinstance(act, Pick):
            graph = simulator.graph.calls[act.call].graph
            used.setdefault(graph, Counter())[act.variant] += 1
    most = max((len(counts) for counts in used.values()), default=0)
    return [
        frozenset((g, v) for g, counts in used.items() for v, _ in counts.most_common(kinds))
        for kinds in MOST_KINDS
        if kinds < most
    ]
