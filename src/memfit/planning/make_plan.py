"""From a profile and a goal to a plan, or to a refusal that says what is possible."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

from memfit.errors import InfeasibleError, UsageError
from memfit.ir.plan import Plan, Prediction
from memfit.ir.profile import LARGE_PAGE, Profile
from memfit.planning import optimal
from memfit.planning.acts import Act, Pick
from memfit.planning.few_variants import with_few_variants, with_measured_variants
from memfit.planning.placed import filled_up, held_bytes, holds, seconds
from memfit.planning.refusal import nothing_fits, strategy_fails, too_slow
from memfit.planning.request import Choice, Request
from memfit.planning.rivals import fastest_of_rivals, made_faster, translated
from memfit.planning.simulate import Simulator, simulator_of
from memfit.planning.strategies import STRATEGIES, choose_all, choose_interval, choose_swap
from memfit.planning.techniques import ACTIVATIONS, MICROBATCH
from memfit.planning.well_placed import well_placed
from memfit.planning.write_plan import read_acts, write_segments
from memfit.units import format_bytes

# Times the lowest peak: budgets to look for choices that the allocator places well.
ROOMS = (1.04, 1.01, 1.1, 1.18, 1.26)
QUICK_ROOMS = (1.02, 1.05, 1.07, 1.14)  # as well, where each takes next to no time
MINIMUM_S = 2.0  # to look for the smallest budget
UNSURE = 0.25  # the work before a copy's end may take so much less than predicted
TRIM_PAYS = 0.1  # of the step's time must be saved by giving pages back where others hold
WORTH_A_CHANGE = 0.01  # of the step's time: less is not worth compiling another variant


@dataclass(frozen=True)
class Goal:
    """What a plan must reach. `margin_bytes` is kept free below the budget."""

    budget_bytes: int | None = None
    activation_reduction: float | None = None
    max_slowdown: float | None = None
    plain_step_s: float | None = None  # what a slowdown is counted from; None: as it was profiled
    strategy: str = "optimal"
    interval: int | None = None
    margin_bytes: int = 0
    time_limit_s: float = 8.0
    min_tensor_bytes: int = 0  # smaller tensors are not worth recomputing or moving
    techniques: tuple[str, ...] = ("recompute",)
    last_resort: tuple[str, ...] = ()  # to be used as well, where no plan holds the budget
    host_bytes: int | None = None  # at most so many may wait on the host; None: as it comes
    force: tuple[str, ...] = ()  # techniques to use although they change what is computed

    @property
    def counts(self) -> str:
        """A budget counts what the process holds, a reduction of activations live bytes."""
        return "live" if self.budget_bytes is None else "reserved"

    def at_last(self) -> Goal:
        """The same goal with its last resort allowed."""
        every = tuple(dict.fromkeys((*self.techniques, *self.last_resort)))
        return replace(self, techniques=every, last_resort=())

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UsageError(
                f"unknown strategy {self.strategy!r}",
                hint=f"one of: {', '.join(STRATEGIES)}",
            )
        if self.activation_reduction is not None and not 0 < self.activation_reduction < 1:
            raise UsageError(
                f"activation_reduction is {self.activation_reduction}, not between 0 and 1",
                hint="0.40 asks for 40 % less activation memory",
            )
        if self.max_slowdown is not None and not self.max_slowdown >= 1:  # nor nan
            raise UsageError(
                f"max_slowdown is {self.max_slowdown}, not 1 or more",
                hint="1.20 allows a step that takes 20 % longer",
            )
        if self.interval is not None and self.interval < 1:
            raise UsageError(f"interval is {self.interval}", hint="it counts segments: 1 or more")
        if self.min_tensor_bytes < 0:
            raise UsageError(
                f"min_tensor_bytes is {self.min_tensor_bytes}, below 0",
                hint="tensors of fewer bytes are left as they are: 0 or more",
            )


@contextmanager
def _no_collecting() -> Iterator[None]:
    """Keep Python from looking through all that torch and its compilers hold, again and again."""
    there = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if there:
            gc.enable()


@_no_collecting()
def make_plan(profile: Profile, goal: Goal, known: Plan | None = None) -> Plan:
    """Return the plan that the goal's strategy finds; raise InfeasibleError when none is.

    `known` is a plan that ran already: it is taken again where it is about as good.
    """
    started = time.perf_counter()
    if goal.counts == "live":
        profile = replace(profile, allocator=None)
    simulator = simulator_of(profile, goal.min_tensor_bytes, goal.techniques)
    unplanned = simulator.peak_bytes([])
    budget = _budget(profile, goal, unplanned)
    limit_s = float("inf")
    plain_s = goal.plain_step_s or profile.step_s
    if goal.max_slowdown is not None:  # techniques of the step itself may have used it up
        limit_s = max(goal.max_slowdown * plain_s - profile.step_s, 0.0)
    target = None if budget is None else budget - goal.margin_bytes
    hopeless = target is not None and target < profile.graph.static_bytes
    choice = None if hopeless else _fastest(simulator, goal, target, limit_s, known)
    fits = choice is not None and holds(simulator, choice, target)
    smallest = _smallest(simulator, goal.host_bytes, thorough=not fits)
    if known is not None:  # of all there are only a few are tried, and this one is there
        ran = Choice(read_acts(simulator, known), trim=known.trim)
        smallest = min(smallest, ran, key=lambda c: held_bytes(simulator, c.acts, c.trim))
    minimum = smallest.acts
    least_bytes = held_bytes(simulator, minimum, smallest.trim) + goal.margin_bytes
    minimum_bytes = least_bytes + page_bytes(profile)
    if choice is None or not fits:
        if budget is not None and (goal.strategy != "optimal" or least_bytes > budget):
            if least_bytes > budget:
                more = _host_bytes_that_help(simulator, goal, budget)
                raise nothing_fits(simulator, budget, minimum, minimum_bytes, goal.techniques, more)
            reached = None if choice is None else choice.acts
            raise strategy_fails(simulator, goal.strategy, budget, reached, minimum_bytes)
        choice = smallest
        if target is not None:
            choice = filled_up(simulator, smallest, target, goal.host_bytes)
        if target is not None and _both(simulator):
            choice = made_faster(simulator, choice, _request(simulator, goal, target, limit_s))
    choice = _with_time_to_spare(simulator, choice, target)
    if known is not None and not _all_ran(simulator, choice):
        request = _request(simulator, goal, target, limit_s)
        choice = _ran(simulator, known, choice, request, seconds(simulator, choice)) or choice
    _check_host(simulator, goal, choice, budget)
    slowdown = seconds(simulator, choice) / plain_s
    if goal.max_slowdown is not None and slowdown > goal.max_slowdown * (1 + 1e-9):
        raise too_slow(_what(goal, budget), slowdown, goal.max_slowdown, budget, minimum_bytes)
    # With an allocator `_smallest` only tries a few: the choice itself may hold less.
    held = held_bytes(simulator, choice.acts, choice.trim) + goal.margin_bytes
    minimum_bytes = min(minimum_bytes, held)
    return _plan(simulator, goal, budget, choice, minimum_bytes, time.perf_counter() - started)


def _with_time_to_spare(simulator: Simulator, choice: Choice, target: int | None) -> Choice:
    """The choice with points at which nothing waits for copies if the work is faster than
    predicted, where it holds and takes no longer with them."""
    if simulator.copy is None or not simulator.host_bytes(choice.acts):
        return choice
    # As much room as there is, or none but its own: then hardly more is held than before.
    for room in (target, simulator.peak_bytes(choice.acts)):
        later = replace(choice, acts=simulator.scheduled(choice.acts, room, UNSURE))
        as_fast = seconds(simulator, later) <= (1 + 1e-9) * seconds(simulator, choice)
        if as_fast and holds(simulator, later, target):
            return later
    return choice


def _host_bytes_that_help(simulator: Simulator, goal: Goal, budget: int) -> int | None:
    """What a host budget must be for a plan that holds; None where it does not stand in the way."""
    if goal.host_bytes is None or simulator.copy is None:
        return None
    everything = choose_swap(simulator, Request(None, float("inf")))
    if simulator.host_bytes(everything.acts) <= goal.host_bytes:
        return None
    free = _smallest(simulator, None, thorough=True)
    moved = simulator.host_bytes(free.acts)
    held = held_bytes(simulator, free.acts, free.trim) + goal.margin_bytes
    return moved if moved > goal.host_bytes and held <= budget else None


def _check_host(simulator: Simulator, goal: Goal, choice: Choice, budget: int | None) -> None:
    """Refuse a choice that needs more host memory than there may be."""
    moved = simulator.host_bytes(choice.acts)
    if goal.host_bytes is not None and moved > goal.host_bytes:
        raise InfeasibleError(
            f"strategy {goal.strategy!r} puts {format_bytes(moved)} on the host, and the host "
            f"budget is {format_bytes(goal.host_bytes)}",
            budget_bytes=budget,
            hint=f"give --host-budget {moved}, or let strategy optimal choose what to move",
        )


def minimum_feasible(
    profile: Profile,
    min_tensor_bytes: int = 0,
    techniques: tuple[str, ...] = ("recompute",),
    host_bytes: int | None = None,
) -> tuple[int, tuple[Act, ...]]:
    """The smallest budget that any plan holds, and its acts."""
    simulator = simulator_of(profile, min_tensor_bytes, techniques)
    smallest = _smallest(simulator, host_bytes, thorough=True)
    least = held_bytes(simulator, smallest.acts, smallest.trim)
    return least + page_bytes(profile), smallest.acts


def page_bytes(profile: Profile) -> int:
    """What another process may need more: its allocator begins with other holes, so by a page."""
    return 0 if profile.allocator is None else LARGE_PAGE


def _all_ran(simulator: Simulator, choice: Choice) -> bool:
    """Whether there is nothing in the choice that would have to be compiled and run first."""
    return all(simulator.variant(a).measured for a in choice.acts if isinstance(a, Pick))


def _ran(
    simulator: Simulator, known: Plan, like: Choice, request: Request, best_s: float
) -> Choice | None:
    """The plan that ran, or one of variants that ran, if it holds and hardly takes longer than
    `best_s`; what is said of a choice `like` it holds for it, too."""
    enough_s = (1 + WORTH_A_CHANGE) * best_s
    again = replace(like, acts=read_acts(simulator, known), trim=known.trim)
    if holds(simulator, again, request.budget) and seconds(simulator, again) <= enough_s:
        return again
    if request.budget is None or not _is_compiled(simulator, known.strategy):
        return None
    measured = with_measured_variants(simulator, request, like)
    good = measured is not None and seconds(simulator, measured) <= enough_s
    return measured if good else None


def _fastest(
    simulator: Simulator, goal: Goal, target: int | None, limit_s: float, known: Plan | None
) -> Choice | None:
    """What the goal's strategy finds; if that may do more than one thing, the best of all ways."""
    if goal.strategy != "optimal" or target is None or not _both(simulator):
        return _choose(simulator, goal, target, limit_s, known)

    def choose(simulator: Simulator, strategy: str, share: float, enough_s: float) -> Choice | None:
        less = replace(goal, strategy=strategy, time_limit_s=share * goal.time_limit_s)
        return _choose(simulator, less, target, limit_s, enough_s=enough_s)

    return fastest_of_rivals(simulator, _request(simulator, goal, target, limit_s), choose)


def _both(simulator: Simulator) -> bool:
    """Whether a plan may both recompute and move to the host."""
    return simulator.recompute and simulator.copy is not None


def _choose(
    simulator: Simulator,
    goal: Goal,
    target: int | None,
    limit_s: float,
    known: Plan | None = None,
    enough_s: float = float("inf"),
) -> Choice | None:
    """Ask the strategy; where the allocator's placement matters for less, or to trim.

    What `known` has that ran is taken at once where it would be whatever the search ended with.
    A step that takes as long as `enough_s` before it is placed is not looked at any further.
    """
    strategy = STRATEGIES[goal.strategy]
    request = _request(simulator, goal, target, limit_s)
    first = strategy(simulator, request)
    if first is None or target is None:
        return first
    if seconds(simulator, first) >= enough_s:
        return None
    if known is not None and first.note is None:
        least_s = simulator.profile.step_s + first.lower_bound_s
        ran = _ran(simulator, known, first, request, least_s)
        if ran is not None:
            return ran
    if holds(simulator, first, target):
        return _compilable(simulator, request, first, goal.strategy)

    def placed(trim: bool) -> Choice | None:
        return well_placed(simulator, request, replace(first, trim=trim), goal.strategy)

    found = placed(False)
    far_s = (1 + TRIM_PAYS) * (simulator.profile.step_s + first.lower_bound_s)
    # Pages given back must be mapped again, and how long that takes varies: only where nothing
    # else holds, or is far slower.
    if found is None or seconds(simulator, found) > far_s:
        trimmed = placed(True)
        if found is None or (
            trimmed is not None
            and (1 + TRIM_PAYS) * seconds(simulator, trimmed) < seconds(simulator, found)
        ):
            found = trimmed
    return first if found is None else _compilable(simulator, request, found, goal.strategy)


def _request(simulator: Simulator, goal: Goal, target: int | None, limit_s: float) -> Request:
    """What is asked of a strategy."""
    time_limit_s = goal.time_limit_s
    if simulator.profile.allocator is not None:  # there is more to do than to solve once
        time_limit_s /= 2
    return Request(target, limit_s, goal.interval, time_limit_s, goal.host_bytes)


def _compilable(simulator: Simulator, request: Request, choice: Choice, strategy: str) -> Choice:
    """The choice, with few variants where each has to be compiled."""
    if not _is_compiled(simulator, strategy):
        return choice
    return with_few_variants(simulator, request, choice)


def _is_compiled(simulator: Simulator, strategy: str) -> bool:
    """Whether the strategy's variants take seconds to compile, and others would do."""
    return strategy == "optimal" and simulator.profile.executor == "inductor"


@lru_cache(maxsize=8)
def _smallest(simulator: Simulator, host_bytes: int | None, *, thorough: bool) -> Choice:
    """The choice that needs the smallest budget, among those with the lowest peaks.

    Where the allocator's placement counts, choices with some room may need less than the lowest;
    `thorough` tries more of them.
    """
    free = Request(None, float("inf"))
    candidates: list[tuple[Act, ...]] = [()]
    if simulator.recompute:
        candidates += [choose_all(simulator, free).acts, choose_interval(simulator, free).acts]
    if simulator.copy is not None:
        moved = choose_swap(simulator, free).acts
        candidates += [moved] if simulator.fits_host(moved, host_bytes) else []
    placed = simulator.profile.allocator is not None
    hard = _both(simulator)  # to solve, so that what each finds alone has to do
    if hard:
        for source in [simulator.only(t) for t in ACTIVATIONS[: 2 if thorough else 1]]:
            quick = thorough and optimal.is_quick(source)
            found = _smallest(source, host_bytes, thorough=quick)
            candidates.append(translated(found, source, simulator).acts)
    try:
        limit_s = MINIMUM_S * (2 if thorough and not hard else 1)
        if thorough or not hard:
            lowest = optimal.smallest(simulator, time_limit_s=limit_s, host_bytes=host_bytes)
            candidates += [] if lowest is None else [lowest.acts]
        low = min(simulator.peak_bytes(acts) for acts in candidates)
        rooms = list(ROOMS if thorough and not hard else ROOMS[: thorough or not hard])
        rooms += QUICK_ROOMS if thorough and optimal.is_quick(simulator) else ()
        for room in rooms if placed else ():
            budget = int(room * low)
            roomier = optimal.fastest(
                simulator, budget, time_limit_s=limit_s, host_bytes=host_bytes
            )
            candidates += [] if roomier is None else [roomier.acts]
    except KeyboardInterrupt:
        pass  # the plan is made already; its minimum is then the best that was seen
    trims = (False, True) if placed else (False,)
    choices = [Choice(acts, trim=trim) for acts in candidates for trim in trims]
    return min(choices, key=lambda c: held_bytes(simulator, c.acts, c.trim))


def _budget(profile: Profile, goal: Goal, unplanned: int) -> int | None:
    if goal.activation_reduction is None:
        return goal.budget_bytes
    activations = unplanned - profile.graph.fixed_bytes
    reduced = unplanned - round(goal.activation_reduction * activations)
    return reduced if goal.budget_bytes is None else min(reduced, goal.budget_bytes)


def _what(goal: Goal, budget: int | None) -> str:
    if goal.activation_reduction is not None:
        return f"cutting activations by {goal.activation_reduction:.0%}"
    return "the plan" if budget is None else f"the budget of {format_bytes(budget)}"


def _plan(
    simulator: Simulator,
    goal: Goal,
    budget: int | None,
    choice: Choice,
    minimum_bytes: int,
    plan_s: float,
) -> Plan:
    profile = simulator.profile
    step_s = seconds(simulator, choice)
    bound_s = profile.step_s + choice.lower_bound_s
    segments, variants = write_segments(simulator, choice.acts)
    peak = simulator.timeline(choice.acts).peak
    traffic = simulator.traffic(choice.acts)
    host_bytes = simulator.host_bytes(choice.acts)
    # Copies have streams of their own, and pages cannot be given back inside of a graph.
    graphs = profile.cuda_graphs and not choice.trim and not host_bytes
    return Plan(
        fingerprint=profile.fingerprint,
        workload=profile.workload,
        torch=profile.device.torch,
        strategy=goal.strategy,
        budget_bytes=budget,
        counts=goal.counts,
        segments=segments,
        variants=variants,
        predicted=Prediction(
            peak_bytes=peak.total,
            reserved_bytes=held_bytes(simulator, choice.acts, choice.trim),
            step_s=step_s,
            lower_bound_s=min(bound_s, step_s),
            gap=max(0.0, 1 - bound_s / step_s) if step_s > 0 else 0.0,
            categories=peak.bytes,
            where=peak.where,
            copy_s=traffic.out_s + traffic.in_s,
            stall_s=traffic.stall_s,
        ),
        baseline_peak_bytes=simulator.peak_bytes([]),
        baseline_step_s=profile.step_s,
        static_bytes=profile.graph.fixed_bytes,
        minimum_feasible_bytes=minimum_bytes,
        plan_s=plan_s,
        executor=profile.executor,
        techniques=_techniques(simulator, choice.acts),
        split=profile.split,
        tile_bytes=profile.tile_bytes,
        state_kept_bytes=profile.state_kept_bytes,
        host_bytes=host_bytes,
        host_budget_bytes=goal.host_bytes if host_bytes else None,
        smallest_move_bytes=simulator.smallest_move_bytes,
        trim=choice.trim,
        inplace_off=profile.inplace_off,
        channels_last=profile.channels_last,
        cuda_graphs=graphs,
        padded=profile.padded,
        model_calls=profile.graph.model_calls,
        notes=(*profile.notes, *_notes(choice, graphs)),
    )


def _techniques(simulator: Simulator, acts: Sequence[Act]) -> tuple[str, ...]:
    """The techniques at work when the step was profiled, and those of the acts."""
    profile = simulator.profile
    split = (MICROBATCH,) if profile.split > 1 else ()
    return (*profile.setup, *split, *_used(simulator, acts))


def _used(simulator: Simulator, acts: Sequence[Act]) -> tuple[str, ...]:
    """The techniques that acts amount to."""
    away = [act for act in acts if simulator.effect(act).away is not None]
    again = [act for act in acts if isinstance(act, tuple) or simulator.recomputes(act)]
    return ("recompute",) * bool(again) + ("offload",) * bool(away)


def _notes(choice: Choice, graphs: bool) -> list[str]:
    notes = [] if choice.note is None else [choice.note]
    if graphs:
        notes.append("forward and backward are launched as CUDA graphs: the host held them up")
    if choice.trim:
        notes.append("the allocator's free pages are given back between forward and backward")
    return notes
