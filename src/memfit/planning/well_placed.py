"""The fastest choice found that holds where the allocator places it, looked for from several ends.

Strategies see live bytes. What is asked for less is slower by and by, and it need not be placed
better: a run goes through the forward of the unplanned code, whose memory leaves a hole below what
comes after, and of two choices that differ by one act one may be placed by a tenth worse. So where
asking for less ends far from the bound, it is asked for choices without runs, a lean choice is
filled up, and choices that miss by little are mended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memfit.planning import optimal
from memfit.planning.acts import Act, calls_of
from memfit.planning.few_variants import of_most_used
from memfit.planning.mend import nearest_mended
from memfit.planning.placed import fastest_holding, filled_up, holds, seconds, tightened
from memfit.planning.request import Choice, Request
from memfit.planning.rivals import made_faster
from memfit.planning.simulate import Simulator
from memfit.planning.strategies import STRATEGIES, choose_interval, choose_swap

NEAR = 0.005  # of the bound: nearer than this no other way to a plan is tried
# The same as long as fused variants have not run: what they take is only reckoned, and off by more.
NEAR_A_GUESS = 0.01


def well_placed(
    simulator: Simulator, request: Request, choice: Choice, strategy: str
) -> Choice | None:
    """The fastest found that holds; None when nothing does. `choice` is that for live bytes."""
    budget = request.budget
    assert budget is not None

    def ask(request: Request) -> list[Choice]:
        found = STRATEGIES[strategy](simulator, request)
        return [] if found is None else _alike(simulator, request, found, strategy)

    first = _alike(simulator, request, choice, strategy)
    known = tightened(simulator, ask, request, first)
    if strategy != "optimal":
        return fastest_holding(simulator, known, budget)
    guessed = simulator.profile.executor == "inductor" and not simulator.profile.known
    near = NEAR_A_GUESS if guessed else NEAR
    near_s = (1 + near) * (simulator.profile.step_s + choice.lower_bound_s)
    for more in (_without_runs, _filled_up, _mended)[0 if simulator.recompute else 1 :]:
        best = fastest_holding(simulator, known, budget)
        if best is not None and seconds(simulator, best) <= near_s:
            return best
        known += more(simulator, request, choice, known)
    best = fastest_holding(simulator, known, budget)
    return None if best is None else made_faster(simulator, best, request)


def _alike(simulator: Simulator, request: Request, found: Choice, strategy: str) -> list[Choice]:
    """The choice and, where it takes next to no time, the same with fewer variants."""
    quick = strategy == "optimal" and optimal.is_quick(simulator)
    return [found, *(of_most_used(simulator, request, found) if quick else ())]


def _without_runs(
    simulator: Simulator, request: Request, choice: Choice, known: Sequence[Choice]
) -> list[Choice]:
    """What is found when no call with variants may be in a run."""

    def ask(request: Request) -> list[Choice]:
        assert request.budget is not None
        found = optimal.fastest(
            simulator,
            request.budget,
            time_limit_s=request.time_limit_s,
            host_bytes=request.host_bytes,
            may=inside_only(simulator),
        )
        return [] if found is None else [replace(choice, acts=found.acts)]

    half = replace(request, time_limit_s=request.time_limit_s / 2)
    found = ask(half)
    return tightened(simulator, ask, half, found) if found else []


def inside_only(simulator: Simulator) -> optimal.May:
    """Whether an act is no run of calls that could run by a variant instead."""
    calls = simulator.graph.calls

    def may(act: Act) -> bool:
        return not isinstance(act, tuple) or all(calls[call].graph < 0 for call in calls_of(act))

    return may


def _filled_up(
    simulator: Simulator, request: Request, choice: Choice, known: Sequence[Choice]
) -> list[Choice]:
    """Lean choices that hold, filled up."""
    assert request.budget is not None
    budget, host_bytes = request.budget, request.host_bytes
    leans = [replace(choice, acts=acts) for acts in _lean_ends(simulator, request)]
    leans = [lean for lean in leans if simulator.fits_host(lean.acts, host_bytes)]
    fitting = [lean for lean in leans if holds(simulator, lean, budget)]
    return [filled_up(simulator, lean, budget, host_bytes) for lean in fitting]


def _lean_ends(simulator: Simulator, request: Request) -> Iterator[tuple[Act, ...]]:
    """Acts that take little memory and, where these are quick to find, the least."""
    yield (choose_interval if simulator.recompute else choose_swap)(simulator, request).acts
    if optimal.is_quick(simulator):
        lowest = optimal.smallest(simulator, host_bytes=request.host_bytes)
        yield from [] if lowest is None else [lowest.acts]


def _mended(
    simulator: Simulator, request: Request, choice: Choice, known: Sequence[Choice]
) -> list[Choice]:
    """The choices that miss by least, mended."""
    assert request.budget is not None
    found = nearest_mended(
        simulator, known, request.budget, trim=choice.trim, host_bytes=request.host_bytes
    )
    return [replace(choice, acts=mended.acts) for mended in found]
