"""One budget for the whole step: which techniques of the loss and the optimizer pay, beside a plan.

Techniques are tried one after the other, the cheap ones first (an optimizer that has to look at all
gradients before it steps in backward last: it runs forward and backward twice), each on top of
those taken before: the step is profiled with it at work and planned again. It is taken when the
plan gets faster by more than timings differ, or when nothing fits without it and it brings the
smallest budget down.
What was not taken is tried again when a later one was. Of optimizer state that goes to the host, as
much stays as there is room for beside a lean plan. Limits: taken ones are not given back, but state
on the host for the other way to have it there; these two are compared with all of it moved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from memfit.errors import (
    HostMemoryError,
    InfeasibleError,
    MemfitError,
    ModelError,
    UsageError,
)
from memfit.ir.plan import Plan, TechniqueChoice
from memfit.ir.profile import Profile
from memfit.planning.budget import baseline_peak_bytes
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.techniques import (
    ACTIVATIONS,
    IN_BACKWARD,
    INT8_WEIGHTS,
    MICROBATCH,
    ON_HOST,
    ROUNDED_STATE,
    STEP,
)
from memfit.runtime.optimizer.in_backward.train import looks_first
from memfit.runtime.setup import Setup
from memfit.runtime.split import refused_split, samples_in
from memfit.units import format_bytes
from memfit.verify.parts import why_parts_differ
from memfit.workload import Workload

Measure = Callable[[Setup | None, int], Profile]  # with a set-up, of the batch in so many parts
CHEAP = 0.01  # of the plain step: a plan that costs less needs no help
GAIN = 0.02  # of the planned step: less than this may be noise
LESS = 0.01  # of the smallest budget
NEAR = 0.05  # of the step: recomputing that takes no more leaves little to win by moving
TRIED_S = 3.0  # to plan with a technique that may be taken
STATE_IN_ROOM = (1.0, 0.5)  # of what the leanest plan leaves free, for optimizer state to stay
NOT_POSSIBLE = (UsageError, HostMemoryError, ModelError)  # with a technique; without it, it was
NOT_NEEDED = f"not needed: a plan without it costs less than {CHEAP:.0%} of the step"
TILES_PER_BUDGET = 64
SMALLEST_TILE, LARGEST_TILE = 2**18, 2**28


@dataclass(frozen=True)
class Whole:
    """A way to run the whole step: its set-up, the profile with it, and why each was taken."""

    setup: Setup | None
    profile: Profile
    split: int = 1  # parts that the batch is run in
    choices: tuple[TechniqueChoice, ...] = ()

    @property
    def techniques(self) -> tuple[str, ...]:
        """Those of the loss and the optimizer that are at work."""
        return () if self.setup is None else tuple(self.setup.techniques)


@dataclass(frozen=True)
class _Tried:
    profile: Profile
    plan: Plan | None
    refusal: InfeasibleError | None

    @property
    def minimum_bytes(self) -> int:
        if self.refusal is not None and self.refusal.minimum_bytes is not None:
            return self.refusal.minimum_bytes
        return baseline_peak_bytes(self.profile) if self.plan is None else 0


def whole_step(
    workload: Workload, base: Profile, goal: Goal, plan: Plan | None, measure: Measure
) -> Whole:
    """The set-up of a given plan or of the profile, or the best of what the goal allows."""
    if base.setup:
        sizes = base.tile_bytes, base.state_kept_bytes
        return Whole(setup_of(base.setup, workload, base, *sizes), base)
    if plan is not None and plan.setup:
        setup = setup_of(plan.setup, workload, base, plan.tile_bytes, plan.state_kept_bytes)
        return Whole(setup, measure(setup, plan.split), plan.split)
    if plan is not None and plan.split > 1:
        return Whole(None, measure(None, plan.split), plan.split)
    if plan is not None or not {*STEP, MICROBATCH} & set(goal.techniques):
        return Whole(None, base)
    return _best(workload, base, goal, measure)


def _best(workload: Workload, base: Profile, goal: Goal, measure: Measure) -> Whole:
    tile_bytes = tile_for(goal.budget_bytes)
    setup, best = setup_of((), workload, base, tile_bytes), _tried(base, goal)
    choices: dict[str, TechniqueChoice] = {}

    def take_of(names: Sequence[str], split: int) -> list[str]:
        """Try techniques, with the batch in parts; those that are possible and were not taken."""
        nonlocal setup, best
        left, again = deque(names), list[str]()
        while left:
            name = left.popleft()
            if _is_cheap(best, base):
                choices.setdefault(name, TechniqueChoice(name, False, NOT_NEEDED))
                continue
            beside, kept = _beside(setup.techniques, name), setup.state_kept_bytes
            candidate = setup_of(beside, workload, base, tile_bytes, kept)
            choices.pop(name, None)  # in the order of the last word on each
            try:
                found = _tried(measure(candidate, split), goal)
            except NOT_POSSIBLE as error:
                choices[name] = TechniqueChoice(name, False, _why_not(error))
                continue
            choices[name] = _choice(name, best, found, _how(name, found.profile))
            if not choices[name].taken:
                again.append(name)
                continue
            for other in {*setup.techniques} - {*candidate.techniques}:
                choices[other] = replace(choices[other], taken=False, why=f"{name} is better")
            setup, best = candidate, found
            left.extend(again)
            again = []
        return again

    allowed = [t for t in STEP if t in goal.techniques]
    again = take_of(sorted(allowed, key=partial(_turn, workload, base.accumulate)), 1)
    if "optimizer_offload" in setup.techniques and best.plan is not None:
        moved = choices["optimizer_offload"]
        setup, best, moved = _keeping_state(workload, base, goal, measure, setup, best, moved)
        choices["optimizer_offload"] = moved
    split = 1
    if MICROBATCH in goal.techniques:
        found = _split(workload, base, goal, measure, _at_work(setup), best)
        split, best, choices[MICROBATCH] = found
    if split > 1:  # the peak lies elsewhere, and stepping in backward runs nothing twice any more
        take_of(again, split)
    made = tuple(sorted(choices.values(), key=lambda choice: not choice.taken))
    if best.refusal is not None and made:
        _refuse(best.refusal, made)
    return Whole(_at_work(setup), best.profile, split, made)


def _at_work(setup: Setup) -> Setup | None:
    return setup if setup.techniques else None


def _beside(taken: Sequence[str], name: str) -> list[str]:
    """The taken techniques and one more, in place of others for the same: the optimizer's state,
    or frozen weights."""
    same = ((*ON_HOST, *ROUNDED_STATE), INT8_WEIGHTS)
    others = next((ways for ways in same if name in ways), ())
    return [*(t for t in taken if t not in others), name]


def _keeping_state(
    workload: Workload,
    base: Profile,
    goal: Goal,
    measure: Measure,
    setup: Setup,
    best: _Tried,
    choice: TechniqueChoice,
) -> tuple[Setup, _Tried, TechniqueChoice]:
    """The same, with some of the optimizer's state on the device, if that makes the step faster."""
    assert best.plan is not None
    if goal.budget_bytes is None:
        return setup, best, choice
    moved, whole = choice, best
    state = base.graph.static.get("optimizer_state", 0)
    room = goal.budget_bytes - goal.margin_bytes - best.plan.minimum_feasible_bytes
    for share in STATE_IN_ROOM:
        kept = int(share * room)
        if not LESS * state < kept < state:
            continue
        candidate = setup_of(setup.techniques, workload, base, setup.tile_bytes, kept)
        found = _tried(measure(candidate, 1), goal)
        if _better(found, best):
            setup, best = candidate, found
            change = _choice(choice.name, whole, found, f"{format_bytes(kept)} of it may stay: ")
            choice = replace(
                moved,
                why=f"{moved.why}; {change.why}",
                saved_bytes=(moved.saved_bytes or 0) + (change.saved_bytes or 0),
                cost_s=(moved.cost_s or 0.0) + (change.cost_s or 0.0),
            )
    return setup, best, choice


def _split(
    workload: Workload,
    base: Profile,
    goal: Goal,
    measure: Measure,
    setup: Setup | None,
    best: _Tried,
) -> tuple[int, _Tried, TechniqueChoice]:
    """The batch in two parts, in four, and so on as long as that is better."""
    if _is_cheap(best, base):
        return 1, best, TechniqueChoice(MICROBATCH, False, NOT_NEEDED)
    forced = MICROBATCH in goal.force
    why = refused_split(workload, forced=forced)
    try:
        if why is None and not forced:
            why = why_parts_differ(workload)
    except NOT_POSSIBLE as error:
        why = error.message
    if why is not None:
        return 1, best, TechniqueChoice(MICROBATCH, False, f"not possible: {why}")
    whole, split = best, 1
    choice: TechniqueChoice | None = None
    while 2 * split <= samples_in(workload.batch):
        try:
            found = _tried(measure(setup, 2 * split), goal)
        except NOT_POSSIBLE as error:
            return split, best, choice or TechniqueChoice(MICROBATCH, False, _why_not(error))
        tried = _choice(MICROBATCH, best, found, f"in {2 * split} parts ")
        if not tried.taken:
            return split, best, choice or tried
        split, best = 2 * split, found
        choice = _choice(MICROBATCH, whole, best, f"in {split} parts ")
    assert choice is not None, "a batch that can be split has two samples"
    return split, best, choice


def _why_not(error: MemfitError) -> str:
    """Why a technique cannot be used, and what can in its place."""
    return f"not possible: {error.message}{f' (hint: {error.hint})' if error.hint else ''}"


def _refuse(refusal: InfeasibleError, tried: Sequence[TechniqueChoice]) -> None:
    said = [f"{choice.name}: {'taken: ' if choice.taken else ''}{choice.why}" for choice in tried]
    raise refusal.saying(f". Tried beside recompute: {'; '.join(said)}") from refusal


def beside(base: Profile, plan: Plan, choices: tuple[TechniqueChoice, ...]) -> Plan:
    """The plan with the plain step as its baseline, and what became of each technique."""
    return replace(
        plan,
        baseline_peak_bytes=baseline_peak_bytes(base),
        baseline_step_s=base.step_s,
        choices=choices,
    )


def setup_of(
    techniques: Sequence[str],
    workload: Workload,
    profile: Profile,
    tile_bytes: int | None,
    state_kept_bytes: int = 0,
) -> Setup:
    """The set-up of these techniques on a workload; parameters of a segment step together."""
    modules = [call.module for call in profile.graph.calls]
    sizes = tile_bytes, state_kept_bytes
    return Setup(techniques, workload.model, workload.optimizer, modules, *sizes)


def tile_for(budget_bytes: int | None) -> int | None:
    """Bytes of one tile of logits: a small share of the budget; None: the usual ones."""
    if budget_bytes is None:
        return None
    return max(SMALLEST_TILE, min(budget_bytes // TILES_PER_BUDGET, LARGEST_TILE))


def _turn(workload: Workload, accumulate: int, name: str) -> int:
    """Which comes first: techniques are tried in this order."""
    twice = name == IN_BACKWARD and accumulate == 1 and looks_first(None, workload.scaler)
    return len(STEP) if twice else STEP.index(name)


def _how(name: str, profile: Profile) -> str:
    """What stepping in backward comes to in this step, before what it saves and costs."""
    if name != IN_BACKWARD:
        return ""
    if profile.accumulate > 1:
        return (
            "gradients of earlier batches wait for the last one, so that only what the optimizer's "
            "step takes beside them is saved: "
        )
    if profile.looks_first:
        return (
            "a GradScaler sees all gradients before the first step, so that forward and backward "
            "run twice: "
        )
    return "(with clip_norm forward and backward run twice) "


def _tried(profile: Profile, goal: Goal) -> _Tried:
    """What a plan makes of the profile.

    To plan what moves as well takes ten times as long, and is only done where recomputing alone
    does not hold or takes long; the plan that is run is made with both.
    """
    quick = replace(goal, time_limit_s=TRIED_S)
    if goal.strategy == "optimal" and {*ACTIVATIONS} <= {*goal.techniques}:
        alone = replace(quick, techniques=tuple(t for t in goal.techniques if t != "offload"))
        with suppress(InfeasibleError):
            plan = make_plan(profile, alone)
            if plan.predicted.step_s <= (1 + NEAR) * profile.step_s:
                return _Tried(profile, plan, None)
    try:
        return _Tried(profile, make_plan(profile, quick), None)
    except InfeasibleError as refusal:
        return _Tried(profile, None, refusal)


def _is_cheap(best: _Tried, base: Profile) -> bool:
    return best.plan is not None and best.plan.predicted.step_s <= (1 + CHEAP) * base.step_s


def _better(found: _Tried, best: _Tried) -> bool:
    if found.plan is None:
        return best.plan is None and found.minimum_bytes < (1 - LESS) * best.minimum_bytes
    if best.plan is None:
        return True
    return found.plan.predicted.step_s < (1 - GAIN) * best.plan.predicted.step_s


def _choice(name: str, before: _Tried, after: _Tried, how: str = "") -> TechniqueChoice:
    """Whether a technique is taken: what it does to the step by itself, and to the plan."""
    saved = baseline_peak_bytes(before.profile) - baseline_peak_bytes(after.profile)
    cost_s = after.profile.step_s - before.profile.step_s
    return TechniqueChoice(
        name, _better(after, before), how + _change(before, after), saved, cost_s
    )


def _change(before: _Tried, after: _Tried) -> str:
    """What a technique does, in bytes and seconds."""
    peaks = [baseline_peak_bytes(t.profile) for t in (before, after)]
    words = [f"the unplanned peak goes from {format_bytes(peaks[0])} to {format_bytes(peaks[1])}"]
    if before.plan is not None and after.plan is not None:
        ratio = after.plan.predicted.step_s / before.plan.predicted.step_s
        words.append(f"the planned step takes {ratio:.3f}x the time")
    elif after.plan is not None:
        words.append("a plan holds the budget now")
    elif before.plan is None:
        least = [format_bytes(t.minimum_bytes) for t in (before, after)]
        words.append(f"the smallest budget from {least[0]} to {least[1]}")
    else:
        words.append("no plan holds the budget any more")
    return ", ".join(words)
