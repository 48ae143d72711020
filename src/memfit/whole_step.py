"""One budget for the whole step: which techniques of the loss and the optimizer pay, beside a plan.

Techniques are tried one after the other, the cheap ones first (an optimizer that has to look at all
gradients before it steps in backward last: it runs forward and backward twice), each on top of
those taken before: the step is profiled with it at work and planned again. It is taken when the
plan gets faster by more than timings differ, or when nothing fits without it and it brings the
smallest budget (or, where only the time is too long, the slowdown) down.
What was not taken is tried again when a later one was and, where nothing fits, all of it at once:
of peaks that tie none falls alone. Of optimizer state that goes to the host, as much stays as there
is room for beside a lean plan. In the end what may not be needed any more is given back. Limits:
not all combinations are tried, neither on the way nor when giving back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
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
from memfit.planning.make_plan import Goal
from memfit.planning.techniques import (
    APPROXIMATE,
    IN_BACKWARD,
    MICROBATCH,
    STEP,
)
from memfit.planning.trials import (
    CHEAP,
    GAIN,
    LESS,
    Trial,
    change,
    choice_of,
    is_better,
    is_cheap,
    nearest,
)
from memfit.runtime.optimizer.in_backward.train import looks_first
from memfit.runtime.setup import Setup
from memfit.runtime.split import refused_split, samples_in
from memfit.units import format_bytes
from memfit.verify.parts import why_parts_differ
from memfit.ways import Key, Measure, Way, Ways, joined, key_of, setup_of
from memfit.workload import Workload

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
class _Step:
    """A change that was taken, and the way that came of it."""

    name: str
    key: Key
    static_bytes: int = 0  # that it leaves less of before the step


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
    return _Search(workload, base, goal, measure).found()


class _Search:
    """The best way so far, all that were tried, and the last word on each technique."""

    def __init__(self, workload: Workload, base: Profile, goal: Goal, measure: Measure) -> None:
        self.workload, self.base, self.goal = workload, base, goal
        self.ways = Ways(workload, base, goal, measure, tile_for(goal.budget_bytes))
        self.best = self.ways.plain
        self.choices: dict[str, TechniqueChoice] = {}
        self.steps: list[_Step] = []
        self.vain: list[str] = []  # possible beside the best way, and no better
        self.at_once: set[str] = set()  # taken together with others
        self.can_split = False

    def found(self) -> Whole:
        """The best of what the goal allows; InfeasibleError that says what was tried."""
        allowed = [t for t in STEP if t in self.goal.techniques]
        turn = partial(_turn, self.workload, self.base.accumulate)
        self.take_of(sorted(allowed, key=turn))
        self.take_at_once(1)
        self.keep_state()
        if MICROBATCH in self.goal.techniques:
            self.split()
        if self.best.split > 1:
            # The peak lies elsewhere, and stepping in backward runs nothing twice any more.
            self.take_of(self.vain)
        self.take_at_once(max(self.best.split, 2 if self.can_split else 1))
        self.give_back()
        made = tuple(sorted(self.accounted(), key=lambda choice: not choice.taken))
        if self.best.trial.plan is None and made:
            _refuse(nearest(self.ways.trials), made)
        return Whole(self.best.at_work, self.best.trial.profile, self.best.split, made)

    def take(self, name: str, way: Way, choice: TechniqueChoice) -> None:
        """Go on from this way, for the reason of the choice."""
        before, after = self.best.trial.profile.graph, way.trial.profile.graph
        self.steps.append(_Step(name, way.key, before.static_bytes - after.static_bytes))
        self.choices[name] = replace(choice, taken=True)
        self.best = way

    def take_of(self, names: Sequence[str]) -> None:
        """Try techniques, one after the other, beside those that are taken.

        One that holds the memory and takes longer than allowed has to wait for the others: it is
        taken where none does better.
        """
        left, self.vain = deque(names), []
        slow: dict[str, tuple[Way, TechniqueChoice]] = {}
        while left or slow:
            if left:
                name = left.popleft()
                found = self._tried(name)
                if found is None:
                    continue
                way, choice = found
                self.choices[name] = replace(choice, taken=False)
                self.vain.append(name)
                if not choice.taken:
                    continue
                if way.trial.slowdown is not None and self.best.trial.slowdown is None:
                    slow[name] = found
                    continue
            else:
                name = min(slow, key=lambda name: slow[name][0].trial.slowdown or 0.0)
                way, choice = slow[name]
            for other in {*self.best.techniques} - {*way.techniques}:
                self.not_taken(other, f"{name} is better")
            self.choices.pop(name)  # in the order of the last word on each
            self.take(name, way, choice)
            left.extend(other for other in self.vain if other != name)
            self.vain, slow = [], {}

    def _tried(self, name: str) -> tuple[Way, TechniqueChoice] | None:
        """The way with one more technique, and whether to take it; None where it is not needed, or
        not possible."""
        if is_cheap(self.best.trial, self.base.step_s):
            self.choices.setdefault(name, TechniqueChoice(name, False, NOT_NEEDED))
            return None
        self.choices.pop(name, None)
        try:
            way = self.beside(name)
        except NOT_POSSIBLE as error:
            self.choices[name] = TechniqueChoice(name, False, _why_not(error))
            return None
        return way, choice_of(name, self.best.trial, way.trial, _how(name, way.trial.profile))

    def beside(self, name: str) -> Way:
        """The best way with one more technique."""
        best = self.best
        return self.ways.of(joined(best.techniques, name), best.split, best.kept)

    def not_taken(self, name: str, why: str) -> None:
        """Say of a taken technique that it is none in the end."""
        self.choices[name] = replace(self.choices[name], taken=False, why=why)

    def take_at_once(self, split: int) -> None:
        """Where nothing fits, try at once all that was tried in vain, the parts as well."""
        if self.best.trial.plan is not None:
            return
        more, parts = self._all_in_vain(), split > self.best.split
        if len(more) + parts < 2:
            return
        before, techniques = self.best, (*self.best.techniques, *more)
        names = [*more, *([MICROBATCH] if parts else [])]
        try:
            way = self.ways.of(techniques, split, before.kept)
        except NOT_POSSIBLE as error:
            for name in names:
                said = f"; with {_others(names, name)} {_why_not(error)}"
                self.choices[name] = replace(self.choices[name], why=self.choices[name].why + said)
            return
        if not is_better(way.trial, before.trial):
            return
        self.vain = [name for name in self.vain if name not in more]
        self.at_once |= {*names}
        for number, name in enumerate(names, 1):
            key = key_of(techniques[: len(before.techniques) + number], before.split, before.kept)
            self.steps.append(_Step(name, key))
            said = f"together with {_others(names, name)}: {change(before.trial, way.trial)}"
            self.choices.pop(name)
            self.choices[name] = TechniqueChoice(name, True, said)
        self.steps[-1] = _Step(names[-1], key_of(techniques, split, before.kept))
        self.best = way
        if parts:
            self.split_on(before)

    def _all_in_vain(self) -> list[str]:
        """What was tried in vain and can work at once: of several for the same, the one that leaves
        the least there; none in the place of a taken one."""
        taken = {*self.best.techniques}
        names = [n for n in self.vain if taken < {*joined(self.best.techniques, n)}]

        def static_bytes(name: str) -> int:
            return self.beside(name).trial.profile.graph.static_bytes

        found: list[str] = []
        for name in sorted(names, key=static_bytes, reverse=True):
            found = joined(found, name)
        return sorted(found, key=STEP.index)

    def keep_state(self) -> None:
        """Keep some of the optimizer's state on the device, if that makes the step faster."""
        best, budget, name = self.best, self.goal.budget_bytes, "optimizer_offload"
        if name not in best.techniques or best.trial.plan is None or budget is None:
            return
        moved = self.choices[name]
        state = self.base.graph.static.get("optimizer_state", 0)
        least = best.trial.plan.minimum_feasible_bytes
        room = budget - self.goal.margin_bytes - least
        for share in STATE_IN_ROOM:
            kept = int(share * room)
            if not LESS * state < kept < state:
                continue
            way = self.ways.of(best.techniques, 1, kept)
            if is_better(way.trial, self.best.trial):
                said = f"{format_bytes(kept)} of it may stay: {change(best.trial, way.trial)}"
                self.take(name, way, replace(moved, why=f"{moved.why}; {said}"))

    def split(self) -> None:
        """The batch in two parts, in four, and so on as long as that is better."""
        if is_cheap(self.best.trial, self.base.step_s):
            self.choices[MICROBATCH] = TechniqueChoice(MICROBATCH, False, NOT_NEEDED)
            return
        why = self._why_whole()
        self.can_split = why is None
        if why is not None:
            self.choices[MICROBATCH] = TechniqueChoice(MICROBATCH, False, f"not possible: {why}")
            return
        self.split_on(self.best)

    def _why_whole(self) -> str | None:
        """Why the batch has to stay whole; None where it can be split."""
        forced = MICROBATCH in self.goal.force
        why = refused_split(self.workload, forced=forced)
        try:
            if why is None and not forced:
                why = why_parts_differ(self.workload)
        except NOT_POSSIBLE as error:
            why = error.message
        return why

    def split_on(self, whole: Way) -> None:
        """Twice as many parts as long as that is better; `whole` is how it was run before."""
        while 2 * (split := self.best.split) <= samples_in(self.workload.batch):
            if split > 1 and self._takes_too_long():
                return
            try:
                way = self.ways.of(self.best.techniques, 2 * split, self.best.kept)
            except NOT_POSSIBLE as error:
                why_not = TechniqueChoice(MICROBATCH, False, _why_not(error))
                self.choices.setdefault(MICROBATCH, why_not)
                self.can_split = split > 1
                return
            if not is_better(way.trial, self.best.trial):
                tried_so = choice_of(MICROBATCH, whole.trial, way.trial, f"in {2 * split} parts ")
                self.choices.setdefault(MICROBATCH, tried_so)
                return
            said = f"in {2 * split} parts "
            self.take(MICROBATCH, way, choice_of(MICROBATCH, whole.trial, way.trial, said))

    def _takes_too_long(self) -> bool:
        """Whether the memory would do and the time does not, before anything is planned: more parts
        take no less."""
        goal, best = self.goal, self.best.trial
        if best.slowdown is None or goal.max_slowdown is None:
            return False
        plain_s = goal.plain_step_s or self.base.step_s
        return best.profile.step_s > goal.max_slowdown * plain_s

    def give_back(self) -> None:
        """Take off what the plan is as fast without, the one that costs most first.

        Only what may matter is tried: ways that were tried before, techniques that cost time by
        their own account, and those of which nobody knows as they were taken at once.
        """
        if self.best.trial.plan is None and self.best.trial.slowdown is None:
            return
        for name in sorted(
            (c.name for c in self.choices.values() if c.taken), key=self._turn_to_go
        ):
            for less in self._ways_without(name):
                if not self._is_as_good(less.trial, name):
                    break
                said = change(self.best.trial, less.trial)
                if less.split > 1 and name == MICROBATCH:
                    self.choices[name] = replace(
                        self.choices[name], why=f"in {less.split} parts: {said}"
                    )
                else:
                    self.not_taken(name, f"given back: without it {said}")
                self.best = less

    def _is_as_good(self, less: Trial, name: str) -> bool:
        """Whether a trial without a technique is as good as the best way."""
        best = self.best.trial
        if best.plan is None:
            return is_better(less, best)
        at_most = 1 + GAIN if name in self.at_once else 1.0
        return less.step_s <= at_most * best.step_s

    def _turn_to_go(self, name: str) -> tuple[bool, float]:
        """Which is given back first: what rounds, then what costs most."""
        return name not in APPROXIMATE, -(self.choices[name].cost_s or 0.0)

    def _ways_without(self, name: str) -> Iterator[Way]:
        """The best way without a technique, or in half as many parts, in a quarter, ..."""
        techniques, split = self.best.techniques, self.best.split
        while True:
            if name == MICROBATCH:
                split //= 2
            else:
                techniques = tuple(t for t in techniques if t != name)
            if not self._worth_a_try(name, key_of(techniques, split, self.best.kept)):
                return
            try:
                yield self.ways.of(techniques, split, self.best.kept)
            except NOT_POSSIBLE:
                return
            if name != MICROBATCH or split == 1:
                return

    def _worth_a_try(self, name: str, key: Key) -> bool:
        """Whether the way is known, or might be better for all that is known of the technique."""
        if self.ways.known(key) is not None:
            return True
        away = sum(step.static_bytes for step in self.steps if step.name == name)
        static = self.best.trial.profile.graph.static_bytes + away
        budget = self.goal.budget_bytes
        if budget is not None and static > budget - self.goal.margin_bytes and name != MICROBATCH:
            return False
        cost_s = self.choices[name].cost_s or 0.0
        return name in self.at_once or cost_s > GAIN * self.base.step_s

    def accounted(self) -> list[TechniqueChoice]:
        """The choices, with what each of the taken saves and costs beside those taken before it.

        Where a way between was not tried, it is in the account of the next one.
        """
        taken = {*self.best.techniques, *([MICROBATCH] if self.best.split > 1 else [])}
        found = {n: replace(self.choices[n], saved_bytes=None, cost_s=None) for n in taken}
        before = self.ways.plain.trial
        for step in self.steps:
            techniques, split, kept = step.key
            way = self.ways.known(key_of(techniques & taken, min(split, self.best.split), kept))
            if step.name not in taken or way is None:
                continue
            choice, after = found[step.name], way.trial
            found[step.name] = replace(
                choice,
                saved_bytes=(choice.saved_bytes or 0) + before.peak_bytes - after.peak_bytes,
                cost_s=(choice.cost_s or 0.0) + after.profile.step_s - before.profile.step_s,
            )
            before = after
        assert before is self.best.trial, "the last step leads to the best way"
        return [found.get(name, choice) for name, choice in self.choices.items()]


def _others(names: Sequence[str], name: str) -> str:
    return " and ".join(other for other in names if other != name)


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
