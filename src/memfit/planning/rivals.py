"""Where plans may both recompute and move to the host: what each way finds by itself.

The program of both together is hard, and where the allocator's placement counts it has to be solved
many times. What recomputing or moving alone can do, and what the simple strategies choose, is found
sooner. The fastest of all is then made faster by single changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from memfit.planning import optimal
from memfit.planning.acts import Act, Pick
from memfit.planning.improve import improved
from memfit.planning.mend import nearest_mended
from memfit.planning.placed import held_bytes, holds, seconds, tightened
from memfit.planning.request import Choice, Request
from memfit.planning.simulate import Simulator
from memfit.planning.strategies import INTERRUPTED, OUT_OF_TIME, solve_optimal

STRATEGIES = ("swap", "ratio", "interval", "all", "mutwo")  # the one that takes longest last
# Shares of the time limit; to recompute alone matters most.
RECOMPUTE, OFFLOAD, SIMPLE, TOGETHER, TIGHTER = 0.6, 0.3, 0.2, 0.3, 3.0
EACH = 0.25  # of the last, for one of its solutions
IMPROVING_S = 2.0
OVERRUN = 2.0  # times the limit: then it is not solved again
AS_FAST = 1e-3  # less of the step's time does not matter
FAR = 0.02  # above what is proven: then both together are asked again and again

# The choice of a strategy for a simulator, in a share of the time limit; None where it takes as
# long as so many seconds, wherever it is placed.
Choose = Callable[[Simulator, str, float, float], Choice | None]


def fastest_of_rivals(simulator: Simulator, request: Request, choose: Choose) -> Choice | None:
    """The fastest choice that holds of all ways to plan, made faster; None where none holds.

    What is proven for both together is the bound, whoever finds the choice.
    """
    assert request.budget is not None
    together = _together(simulator, request)
    bound_s = together[0].lower_bound_s if together else 0.0
    holding = [choice for choice in together if _keeps(simulator, choice, request)]
    if holding and together[-1].note == INTERRUPTED:
        return holding[-1]

    def add(rival: Choice | None) -> None:
        if rival is not None and _keeps(simulator, rival, request):
            holding.append(replace(rival, lower_bound_s=bound_s))

    def best_s() -> float:
        return min((seconds(simulator, choice) for choice in holding), default=float("inf"))

    alone = _alone(simulator, "recompute", RECOMPUTE, choose, float("inf"))
    add(alone)
    for strategy in STRATEGIES:
        if strategy == "mutwo" and not (together or holding):
            continue  # it would decide about every tensor, and again for less: nothing holds
        add(choose(simulator, strategy, SIMPLE, best_s()))
    solved = together and all(choice.note != INTERRUPTED for choice in together)
    if solved and holding and best_s() > (1 + FAR) * (simulator.profile.step_s + bound_s):
        first = together[0]
        if _ran_out(first):
            first = _solved_longer(simulator, request) or first
        bound_s = max(first.lower_bound_s, bound_s)
        far = best_s() > (1 + FAR) * (simulator.profile.step_s + bound_s)
        if far and not _ran_out(first):  # else it would again
            holding += _tighter(simulator, request, first)
        if _best(simulator, holding).trim:  # as it pays: then for both together, too
            holding += _tighter(simulator, request, replace(first, trim=True))
        holding = [replace(choice, lower_bound_s=bound_s) for choice in holding]
    proven_s = (1 + AS_FAST) * (simulator.profile.step_s + bound_s)
    if best_s() > proven_s:
        # To move alone is slow to plan, and the step is mostly slow; but it may take less memory.
        add(_alone(simulator, "offload", OFFLOAD, choose, best_s()))
    if not holding:
        return None
    found = made_faster(simulator, _best(simulator, holding), request)
    return _unless_for_nothing(simulator, found, alone, request)


def _unless_for_nothing(
    simulator: Simulator, found: Choice, alone: Choice | None, request: Request
) -> Choice:
    """What is `found`; where it moves nothing and is as fast, what recomputing `alone` finds.

    The plan is then the same whether moving is allowed or not.
    """
    if alone is None or simulator.host_bytes(found.acts) or not _keeps(simulator, alone, request):
        return found
    if seconds(simulator, alone) > (1 + AS_FAST) * seconds(simulator, found):
        return found
    return replace(alone, lower_bound_s=found.lower_bound_s)


def made_faster(simulator: Simulator, choice: Choice, request: Request) -> Choice:
    """A choice that holds, after single changes that make it faster.

    Where variants have to be compiled, by those that it has.
    """
    assert request.budget is not None
    peak = simulator.peak_bytes(choice.acts)
    # What the allocator adds to live bytes, it is likely to add again, or twice that, or half.
    added = held_bytes(simulator, choice.acts, choice.trim) - peak
    rooms = [request.budget - added]
    if added:
        rooms += [request.budget - 2 * added, request.budget - added // 2]

    def fits(acts: Sequence[Act]) -> bool:
        return _keeps(simulator, replace(choice, acts=tuple(acts)), request)

    used = _variants(simulator, choice.acts)
    candidates = [
        act
        for act in optimal.candidates(simulator)
        if simulator.profile.executor != "inductor" or _variants(simulator, [act]) <= used
    ]
    acts = improved(simulator, choice.acts, candidates, fits, rooms, IMPROVING_S)
    return replace(choice, acts=acts)


def translated(choice: Choice, source: Simulator, simulator: Simulator) -> Choice:
    """A choice for the same step in the numbers of another simulator's menus."""

    def of(act: Act) -> Act:
        if not isinstance(act, Pick):
            return act
        variant, graph = source.variant(act), source.graph.calls[act.call].graph
        return replace(act, variant=simulator.offer(graph, variant.saved, variant.moved))

    return replace(choice, acts=tuple(of(act) for act in choice.acts))


def _together(simulator: Simulator, request: Request) -> list[Choice]:
    """What the program of both finds: for the budget, and for less by what the allocator adds."""
    assert request.budget is not None
    shorter = replace(request, time_limit_s=TOGETHER * request.time_limit_s)
    optimal.candidates(simulator)  # made once, whoever asks
    begun = time.process_time()
    first = solve_optimal(simulator, shorter)
    if first is None or holds(simulator, first, request.budget):
        return [] if first is None else [first]
    # The solver looks at the clock between its steps only, and some are long.
    if time.process_time() - begun > OVERRUN * shorter.time_limit_s:
        return [first]
    added = held_bytes(simulator, first.acts) - simulator.peak_bytes(first.acts)
    second = solve_optimal(simulator, replace(shorter, budget=request.budget - added))
    if second is None:
        return [first]
    return [first, replace(second, lower_bound_s=first.lower_bound_s)]


def _ran_out(choice: Choice) -> bool:
    """Whether the solver had too little time for it."""
    return choice.note is not None and choice.note.startswith(OUT_OF_TIME)


def _solved_longer(simulator: Simulator, request: Request) -> Choice | None:
    """What the program of both finds in as much time as each of its tightenings has."""
    time_limit_s = EACH * TIGHTER * request.time_limit_s
    return solve_optimal(simulator, replace(request, time_limit_s=time_limit_s))


def _tighter(simulator: Simulator, request: Request, first: Choice) -> list[Choice]:
    """What the program of both finds for less and less, until that holds where it is placed, and
    what misses by little, mended.

    Recomputing alone may have to give pages back in every step where moving does not.
    """

    def ask(request: Request) -> list[Choice]:
        found = solve_optimal(simulator, request)
        return [] if found is None else [found]

    assert request.budget is not None
    longer = replace(request, time_limit_s=TIGHTER * request.time_limit_s)
    known = tightened(simulator, ask, longer, [first], EACH)
    known += nearest_mended(
        simulator, known, request.budget, trim=first.trim, host_bytes=request.host_bytes
    )
    return [choice for choice in known if _keeps(simulator, choice, request)]


def _alone(
    simulator: Simulator, technique: str, share: float, choose: Choose, enough_s: float
) -> Choice | None:
    """What is found for one technique; a table is filled soon enough."""
    source = simulator.only(technique)
    share = 1.0 if optimal.is_quick(source) else share
    choice = choose(source, "optimal", share, enough_s)
    return None if choice is None else translated(choice, source, simulator)


def _best(simulator: Simulator, choices: Sequence[Choice]) -> Choice:
    """The fastest; where variants have to be compiled, of those as fast one that has few."""
    fastest = min(choices, key=lambda choice: seconds(simulator, choice))
    if simulator.profile.executor != "inductor":
        return fastest
    as_fast_s = (1 + AS_FAST) * seconds(simulator, fastest)
    as_fast = [choice for choice in choices if seconds(simulator, choice) <= as_fast_s]
    return min(as_fast, key=lambda choice: len(_variants(simulator, choice.acts)))


def _variants(simulator: Simulator, acts: Sequence[Act]) -> set[tuple[int, int]]:
    """The variants that acts pick, as (joint graph, number in its menu)."""
    calls = simulator.graph.calls
    return {(calls[act.call].graph, act.variant) for act in acts if isinstance(act, Pick)}


def _keeps(simulator: Simulator, choice: Choice, request: Request) -> bool:
    """Whether a choice stays within both budgets."""
    fits_host = simulator.fits_host(choice.acts, request.host_bytes)
    return fits_host and holds(simulator, choice, request.budget)
