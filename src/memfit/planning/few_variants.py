"""A plan with fewer variants, or such as ran already, where that costs next to nothing.

The program is free to give every call of a kind its own variant, and often does for a thousandth of
the step. Fused code takes seconds per variant to compile; of what ran, memory is known besides.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from memfit.planning import optimal
from memfit.planning.acts import Act, Pick
from memfit.planning.placed import fastest_holding, holds, seconds, tightened
from memfit.planning.request import Choice, Request
from memfit.planning.simulate import Simulator

WORTH = 0.002  # of the step's time: seven seconds an hour, about what a variant takes to compile
MOST_KINDS = (1, 2)  # variants per kind of segment to try
TIME_LIMIT_S = 1.5

Variants = frozenset[tuple[int, int]]  # (joint graph, number in its menu)


def of_most_used(simulator: Simulator, request: Request, choice: Choice) -> list[Choice]:
    """The choice made again of the variants it uses most, if that is hardly slower.

    The allocator often places what is alike much better.
    """
    enough_s = (1 + WORTH) * simulator.step_seconds(choice.acts)
    fewer = _fewer(simulator, choice)[-1:]
    found = [_made_again(simulator, request, choice, only) for only in fewer]
    return [f for f in found if f is not None and simulator.step_seconds(f.acts) <= enough_s]


def with_few_variants(simulator: Simulator, request: Request, choice: Choice) -> Choice:
    """The choice made again of its most used variants, if that holds and is hardly slower."""
    enough_s = (1 + WORTH) * seconds(simulator, choice)
    assert request.budget is not None
    peak = simulator.peak_bytes(choice.acts)  # what the allocator is known to place
    placed = replace(request, budget=min(request.budget, peak))
    for only in _fewer(simulator, choice):
        again = _made_again(simulator, placed, choice, only)
        if again is None or not holds(simulator, again, request.budget):
            continue
        if seconds(simulator, again) <= enough_s:
            return again
    return choice


def with_measured_variants(simulator: Simulator, request: Request, choice: Choice) -> Choice | None:
    """The choice made again of variants that ran already, placed; None where that does not hold."""
    only: Variants = frozenset(
        (graph, number)
        for graph, menu in enumerate(simulator.menus)
        for number, (variant, _) in enumerate(menu)
        if variant.measured
    )

    def ask(request: Request) -> list[Choice]:
        again = _made_again(simulator, request, choice, only)
        return [] if again is None else [again]

    found = ask(request)
    if not found:
        return None
    known = tightened(simulator, ask, request, found)
    return fastest_holding(simulator, known, request.budget)


def _made_again(
    simulator: Simulator, request: Request, choice: Choice, only: Variants
) -> Choice | None:
    """The choice with these variants alone; None when nothing is found."""
    assert request.budget is not None
    calls = simulator.graph.calls

    def may(act: Act) -> bool:
        return not isinstance(act, Pick) or (calls[act.call].graph, act.variant) in only

    found = optimal.fastest(
        simulator,
        request.budget,
        time_limit_s=min(request.time_limit_s, TIME_LIMIT_S),
        host_bytes=request.host_bytes,
        may=may,
    )
    return None if found is None else replace(choice, acts=found.acts)


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
