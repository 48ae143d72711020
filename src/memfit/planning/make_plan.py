"""From a profile and a goal to a plan, or to a refusal that says what is possible."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from memfit.errors import InfeasibleError, UsageError
from memfit.ir.plan import KEEP, RECOMPUTE, Plan, Prediction, SegmentPlan
from memfit.ir.profile import Profile
from memfit.planning import optimal
from memfit.planning.reserved import reserved_bytes
from memfit.planning.simulate import Run, Simulator, simulator_of
from memfit.planning.strategies import (
    STRATEGIES,
    Choice,
    Request,
    Strategy,
    choose_all,
    choose_interval,
    saved_bytes,
)
from memfit.units import format_bytes, format_seconds

MAX_TIGHTENINGS = 10


@dataclass(frozen=True)
class Goal:
    """What a plan must reach. `margin_bytes` is kept free below the budget."""

    budget_bytes: int | None = None
    activation_reduction: float | None = None
    max_slowdown: float | None = None
    strategy: str = "optimal"
    interval: int | None = None
    margin_bytes: int = 0
    time_limit_s: float = 10.0

    @property
    def counts(self) -> str:
        """A budget counts what the process holds, a reduction of activations live bytes."""
        return "live" if self.budget_bytes is None else "reserved"

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
        if self.max_slowdown is not None and self.max_slowdown < 1:
            raise UsageError(
                f"max_slowdown is {self.max_slowdown}, below 1",
                hint="1.20 allows a step that takes 20 % longer",
            )
        if self.interval is not None and self.interval < 1:
            raise UsageError(f"interval is {self.interval}", hint="it counts segments: 1 or more")


def make_plan(profile: Profile, goal: Goal) -> Plan:
    """Return the plan that the goal's strategy finds; raise InfeasibleError when none is."""
    started = time.perf_counter()
    if goal.counts == "live":
        profile = replace(profile, allocator=None)
    simulator = simulator_of(profile)
    unplanned = simulator.peak_bytes([])
    budget = _budget(profile, goal, unplanned)
    limit_s = float("inf")
    if goal.max_slowdown is not None:
        limit_s = (goal.max_slowdown - 1) * profile.step_s
    target = None if budget is None else budget - goal.margin_bytes
    choice = _choose(simulator, goal, target, limit_s)
    smallest = _smallest(simulator)
    minimum = smallest.runs
    minimum_bytes = held_bytes(simulator, minimum, smallest.trim) + goal.margin_bytes
    if choice is None or not _holds(simulator, choice, target):
        assert budget is not None
        if goal.strategy != "optimal" or minimum_bytes > budget:
            raise _refusal(simulator, goal, budget, choice, minimum, minimum_bytes)
        choice = smallest
    extra_s = _seconds(simulator, choice) - profile.step_s
    if extra_s > limit_s * (1 + 1e-9):
        slowdown = 1 + extra_s / profile.step_s
        raise InfeasibleError(
            f"{_what(goal, budget)} costs {slowdown:.3f}x the plain step's time, more than the "
            f"allowed {goal.max_slowdown:.3f}x",
            budget_bytes=budget,
            minimum_bytes=minimum_bytes,
            hint=f"allow --max-slowdown {slowdown:.2f}, or ask for less memory saved",
        )
    # With an allocator `_smallest` only tries a few: the choice itself may hold less.
    held = held_bytes(simulator, choice.runs, choice.trim) + goal.margin_bytes
    minimum_bytes = min(minimum_bytes, held)
    return _plan(simulator, goal, budget, choice, minimum_bytes, time.perf_counter() - started)


def minimum_feasible(profile: Profile) -> tuple[int, tuple[Run, ...]]:
    """The smallest budget that any plan holds, and its runs."""
    simulator = simulator_of(profile)
    smallest = _smallest(simulator)
    return held_bytes(simulator, smallest.runs, smallest.trim), smallest.runs


def held_bytes(simulator: Simulator, runs: Sequence[Run], trim: bool = False) -> int:
    """What a budget must cover: the allocator's bytes where they are predicted, else live ones."""
    return max(reserved_bytes(simulator, runs, trim) or 0, simulator.peak_bytes(runs))


def _holds(simulator: Simulator, choice: Choice, target: int | None) -> bool:
    return target is None or held_bytes(simulator, choice.runs, choice.trim) <= target


def _seconds(simulator: Simulator, choice: Choice) -> float:
    return simulator.step_seconds(choice.runs) + choice.trim * simulator.profile.trim_s


def _choose(simulator: Simulator, goal: Goal, target: int | None, limit_s: float) -> Choice | None:
    """Ask the strategy, with and without trimming where the allocator's placement matters."""
    strategy = STRATEGIES[goal.strategy]
    request = Request(target, limit_s, goal.interval, goal.time_limit_s)
    first = strategy(simulator, request)
    if first is None or target is None or _holds(simulator, first, target):
        return first
    options = [first]
    for trim in (False, True):
        found = _tightened(simulator, strategy, request, replace(first, trim=trim))
        if _holds(simulator, found, target):
            options.append(found)
    return min(options[1:] or options, key=lambda choice: _seconds(simulator, choice))


def _tightened(
    simulator: Simulator, strategy: Strategy, request: Request, choice: Choice
) -> Choice:
    """Ask for less until the allocator, too, stays under the budget.

    What was proven for the budget stays the bound; for less than it, more could be proven.
    """
    bound_s = choice.lower_bound_s
    target = request.budget
    assert target is not None
    asked = target
    for _ in range(MAX_TIGHTENINGS):
        over = held_bytes(simulator, choice.runs, choice.trim) - target
        if over <= 0:
            return choice
        asked = min(asked, simulator.peak_bytes(choice.runs)) - max(over // 2, target // 200)
        found = strategy(simulator, replace(request, budget=asked, time_limit_s=3.0))
        if found is None or found.runs == choice.runs:
            return choice
        choice = replace(found, trim=choice.trim, lower_bound_s=bound_s)
    return choice


@lru_cache(maxsize=2)
def _smallest(simulator: Simulator) -> Choice:
    """The choice that needs the smallest budget, among those with the lowest peaks."""
    free = Request(None, float("inf"))
    candidates = [choose_all(simulator, free).runs, choose_interval(simulator, free).runs]
    placed = simulator.profile.allocator is not None
    try:
        lowest = optimal.smallest(simulator).runs
        candidates.insert(0, lowest)
        if placed:
            budget = int(1.04 * simulator.peak_bytes(lowest))
            roomier = optimal.fastest(simulator, budget, time_limit_s=3)
            candidates += [] if roomier is None else [roomier.runs]
    except KeyboardInterrupt:
        pass  # the plan is made already; its minimum is then the best that was seen
    trims = (False, True) if placed else (False,)
    choices = [Choice(runs, trim=trim) for runs in candidates for trim in trims]
    return min(choices, key=lambda c: held_bytes(simulator, c.runs, c.trim))


def blocking_tensors(simulator: Simulator, runs: Sequence[Run], most: int = 5) -> list[str]:
    """The largest blocks at the peak under `runs`, each with its bytes, maker and size."""
    peak = simulator.timeline(runs).peak
    groups: dict[tuple[str, str, str], int] = {}
    for number in simulator.live_blocks(runs, peak.position):
        block = simulator.graph.blocks[number]
        if block.call >= 0:
            where = simulator.graph.calls[block.call].name
        else:
            where = "code between segments" if block.birth < simulator.graph.forward_end else ""
        key = (block.category, where, block.origin.removeprefix("aten::"))
        groups[key] = groups.get(key, 0) + block.bytes
    static = [((name, "", ""), n) for name, n in simulator.graph.static.items() if n]
    ranked = sorted([*static, *groups.items()], key=lambda item: -item[1])[:most]
    return [
        f"{format_bytes(n)} {' '.join(part for part in (origin, category) if part)}"
        + (f" in {where}" if where else "")
        for (category, where, origin), n in ranked
    ]


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


def _refusal(
    simulator: Simulator,
    goal: Goal,
    budget: int,
    choice: Choice | None,
    minimum: Sequence[Run],
    minimum_bytes: int,
) -> InfeasibleError:
    if minimum_bytes <= budget:
        reached = "nothing" if choice is None else format_bytes(simulator.peak_bytes(choice.runs))
        return InfeasibleError(
            f"strategy {goal.strategy!r} does not meet the budget of {format_bytes(budget)}: "
            f"it reaches {reached}",
            budget_bytes=budget,
            minimum_bytes=minimum_bytes,
            hint=f"strategy 'optimal' goes down to {format_bytes(minimum_bytes)}",
        )
    fixed = simulator.graph.fixed_bytes
    blocking = "; ".join(blocking_tensors(simulator, minimum))
    return InfeasibleError(
        f"no plan fits into {format_bytes(budget)}: the smallest possible is "
        f"{format_bytes(minimum_bytes)} ({minimum_bytes} bytes), of which {format_bytes(fixed)} "
        f"are parameters, gradients, optimizer state, buffers and batch. "
        f"At its peak ({simulator.timeline(minimum).peak.where}): {blocking}",
        budget_bytes=budget,
        minimum_bytes=minimum_bytes,
        hint=f"try --budget {round(minimum_bytes * 1.02)}, a smaller batch, or bf16",
    )


def _plan(
    simulator: Simulator,
    goal: Goal,
    budget: int | None,
    choice: Choice,
    minimum_bytes: int,
    plan_s: float,
) -> Plan:
    profile = simulator.profile
    step_s = _seconds(simulator, choice)
    bound_s = profile.step_s + choice.lower_bound_s
    peak = simulator.timeline(choice.runs).peak
    return Plan(
        fingerprint=profile.fingerprint,
        workload=profile.workload,
        torch=profile.device.torch,
        strategy=goal.strategy,
        budget_bytes=budget,
        counts=goal.counts,
        segments=_segments(simulator, choice.runs),
        predicted=Prediction(
            peak_bytes=peak.total,
            reserved_bytes=held_bytes(simulator, choice.runs, choice.trim),
            step_s=step_s,
            lower_bound_s=min(bound_s, step_s),
            gap=max(0.0, 1 - bound_s / step_s) if step_s > 0 else 0.0,
            categories=peak.bytes,
            where=peak.where,
        ),
        baseline_peak_bytes=simulator.peak_bytes([]),
        baseline_step_s=profile.step_s,
        static_bytes=profile.graph.fixed_bytes,
        minimum_feasible_bytes=minimum_bytes,
        plan_s=plan_s,
        techniques=("recompute",) if choice.runs else (),
        trim=choice.trim,
        inplace_off=profile.inplace_off,
        model_calls=profile.graph.model_calls,
        notes=(*profile.notes, *_notes(choice)),
    )


def _notes(choice: Choice) -> list[str]:
    notes = [] if choice.note is None else [choice.note]
    if choice.trim:
        notes.append("the allocator's free pages are given back between forward and backward")
    return notes


def _segments(simulator: Simulator, runs: Sequence[Run]) -> tuple[SegmentPlan, ...]:
    run_of = {c: n for n, (first, last) in enumerate(runs) for c in range(first, last + 1)}
    segments = []
    for call in simulator.graph.calls:
        number = run_of.get(call.index)
        saved = saved_bytes(simulator, call.index)
        seconds = simulator.profile.call_times[call.index].recompute_s
        if number is not None:
            together = runs[number][1] - runs[number][0] + 1
            reason = f"frees {format_bytes(saved)} for {format_seconds(seconds)}" + (
                f", in a run of {together}" if together > 1 else ""
            )
        elif call.pinned:
            reason = f"kept: {call.pinned}"
        elif call.leaf:
            reason = "kept: a single layer"
        else:
            reason = "kept: the budget has room"
        segments.append(
            SegmentPlan(
                name=call.name,
                module=call.module,
                number=call.number,
                visits=call.visits,
                kind=call.kind,
                decision=KEEP if number is None else RECOMPUTE,
                saved_bytes=saved,
                recompute_s=seconds,
                reason=reason,
                run=number,
                mutated_buffers=call.mutated_buffers,
            )
        )
    return tuple(segments)
