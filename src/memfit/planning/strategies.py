"""Ways to choose what is recomputed. All share the simulator, so that they can be compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memfit.planning import optimal
from memfit.planning.acts import Act, Pick, Run, calls_of
from memfit.planning.fill_up import fill_up
from memfit.planning.mutwo.strategy import choose_mutwo
from memfit.planning.request import Choice, Request, Strategy
from memfit.planning.simulate import Simulator


def choose_none(simulator: Simulator, request: Request) -> Choice:
    """Keep everything."""
    return Choice(())


def choose_all(simulator: Simulator, request: Request) -> Choice:
    """Recompute every segment by itself; single layers stay, recomputing them frees nothing."""
    return Choice(tuple((c, c) for c in worthwhile_calls(simulator)))


def choose_interval(simulator: Simulator, request: Request) -> Choice:
    """Recompute groups of k consecutive segments, k given or the one with the lowest peak.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016): only what enters a group
    is kept; the lowest peak lies near k = sqrt(segments).
    """
    calls = worthwhile_calls(simulator)
    lengths = range(1, len(calls) + 1) if request.interval is None else [request.interval]
    groupings = [_groups(simulator, calls, k) for k in lengths] or [()]
    return Choice(min(groupings, key=simulator.peak_bytes))


def choose_ratio(simulator: Simulator, request: Request) -> Choice | None:
    """Recompute the segments that free most bytes per second until the budget is met.

    Greedy: a segment that would break the limit on seconds is passed over.
    """
    budget = request.budget
    ranked = sorted(
        worthwhile_calls(simulator),
        key=lambda c: (-saved_bytes(simulator, c) / simulator.seconds_of((c, c)), c),
    )
    chosen: list[Act] = []
    for call in ranked:
        if budget is not None and simulator.peak_bytes(sorted(chosen)) <= budget:
            break
        if simulator.extra_seconds([*chosen, (call, call)]) <= request.max_seconds:
            chosen.append((call, call))
    return Choice(tuple(sorted(chosen)))


def choose_swap(simulator: Simulator, request: Request) -> Choice:
    """Move everything that is kept and large enough to the host, recompute nothing.

    Without a budget, memory is in transit only where that does not raise the peak.
    """
    acts: list[Act] = list(simulator.sends())
    for call in simulator.graph.calls:
        if call.graph >= 0 and call.need >= 0:
            number = simulator.everything_moved(call.graph)
            acts += [] if number is None else [Pick(call.index, number)]
    acts.sort(key=lambda act: calls_of(act)[0])
    return Choice(simulator.scheduled(acts, request.budget))


def choose_optimal(simulator: Simulator, request: Request) -> Choice | None:
    """The least recompute that meets the budget, with a proven bound."""
    return _solved(simulator, request, choose_mutwo)


def solve_optimal(simulator: Simulator, request: Request) -> Choice | None:
    """The same, where other strategies are asked anyway."""
    return _solved(simulator, request, None)


def _solved(simulator: Simulator, request: Request, rival: Strategy | None) -> Choice | None:
    """What the solver finds; where its program is hard, what a `rival` finds, if that is better."""
    if request.budget is None:
        smallest = optimal.smallest(
            simulator, time_limit_s=request.time_limit_s, host_bytes=request.host_bytes
        )
        return None if smallest is None else Choice(smallest.acts)
    seeds = _feasible_seeds(simulator, request)
    best = min(seeds, key=simulator.step_seconds, default=None)
    try:
        solution = optimal.fastest(
            simulator,
            request.budget,
            time_limit_s=request.time_limit_s,
            host_bytes=request.host_bytes,
        )
    except KeyboardInterrupt:
        if best is None:
            raise
        return Choice(best, note=INTERRUPTED)
    hard = simulator.copy is not None  # with copies
    if hard and rival is not None and (solution is None or _far_from_bound(simulator, solution)):
        best = _better_of(simulator, best, rival(simulator, request), request)
    if best is not None and (solution is None or solution.stopped):
        best = fill_up(
            simulator, best, lambda acts: _keeps(simulator, acts, request), request.budget
        )
    if solution is None:
        return None if best is None else Choice(best, note=OUT_OF_TIME)
    if best is not None and simulator.step_seconds(best) < simulator.step_seconds(solution.acts):
        return Choice(best, solution.lower_bound_s)
    note = f"{OUT_OF_TIME}: a better plan may exist" if solution.stopped else None
    return Choice(solution.acts, solution.lower_bound_s, note)


WORTH_A_LOOK = 1e-3  # of the step's time
OUT_OF_TIME = "the solver ran out of time"
INTERRUPTED = "the solver was interrupted: best plan found so far, no bound"

STRATEGIES: dict[str, Strategy] = {
    "optimal": choose_optimal,
    "ratio": choose_ratio,
    "interval": choose_interval,
    "swap": choose_swap,
    "mutwo": choose_mutwo,
    "all": choose_all,
    "none": choose_none,
}


def worthwhile_calls(simulator: Simulator) -> list[int]:
    """Calls that may be recomputed by themselves and free something: no single layers."""
    calls = simulator.graph.calls
    return [c.index for c in calls if not c.leaf and c.pinned is None and c.need >= 0]


def saved_bytes(simulator: Simulator, call: int) -> int:
    """Bytes the call keeps from forward to backward; a block counts for its first holder only."""
    first = np.full(len(simulator.bytes), len(simulator.graph.calls))
    np.minimum.at(first, simulator.hold_block, simulator.hold_call)
    return int(simulator.bytes[first == call].sum())


def _feasible_seeds(simulator: Simulator, request: Request) -> list[tuple[Act, ...]]:
    assert request.budget is not None
    free = Request(request.budget, float("inf"))
    ways: list[Strategy] = [choose_none]
    ways += [choose_ratio, choose_interval] if simulator.recompute else []
    ways += [choose_swap] if simulator.copy is not None else []
    choices = [way(simulator, free) for way in ways]
    return [c.acts for c in choices if c is not None and _keeps(simulator, c.acts, request)]


def _keeps(simulator: Simulator, acts: Sequence[Act], request: Request) -> bool:
    """Whether these acts stay within both budgets."""
    assert request.budget is not None
    fits_host = simulator.fits_host(acts, request.host_bytes)
    return fits_host and simulator.peak_bytes(acts) <= request.budget


def _far_from_bound(simulator: Simulator, solution: optimal.Solution) -> bool:
    """Whether there may be a plan that is faster by enough to look for it."""
    over_s = simulator.extra_seconds(solution.acts) - solution.lower_bound_s
    return solution.stopped or over_s > WORTH_A_LOOK * simulator.profile.step_s


def _better_of(
    simulator: Simulator, best: tuple[Act, ...] | None, other: Choice | None, request: Request
) -> tuple[Act, ...] | None:
    """The faster one of what is known and a choice, if that holds the budget."""
    assert request.budget is not None
    if other is None or simulator.peak_bytes(other.acts) > request.budget:
        return best
    if best is not None and simulator.step_seconds(best) <= simulator.step_seconds(other.acts):
        return best
    return other.acts


def _groups(simulator: Simulator, calls: list[int], length: int) -> tuple[Run, ...]:
    """Cut the chains among `calls` into runs of `length`."""
    runs: list[Run] = []
    for call in calls:
        if runs and runs[-1][1] == call - 1 and simulator.graph.calls[call].chained:
            first, last = runs[-1]
            if last - first + 1 < length:
                runs[-1] = (first, call)
                continue
        runs.append((call, call))
    return tuple(runs)
