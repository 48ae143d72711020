"""What a plan makes of the step run in some way, and which of two ways is better.

A way whose plan is within the goal is better than one without; of two such the one that is faster
by more than timings differ; where the memory would do and the time does not, the one that takes
less of it; where not even the memory does, the one with the smaller smallest budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from memfit.errors import InfeasibleError
from memfit.ir.plan import Plan, TechniqueChoice
from memfit.ir.profile import Profile
from memfit.planning.budget import baseline_peak_bytes
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.techniques import ACTIVATIONS
from memfit.units import format_bytes

CHEAP = 0.01  # of the plain step: a plan that costs less needs no help
GAIN = 0.02  # of the planned step: less than this may be noise
LESS = 0.01  # of the smallest budget
NEAR = 0.05  # of the step: recomputing that takes no more leaves little to win by moving
TRIED_S = 3.0  # to plan with a technique that may be taken


@dataclass(frozen=True)
class Trial:
    """A profile of the step, and the plan that was made of it or why there is none."""

    profile: Profile
    plan: Plan | None
    refusal: InfeasibleError | None

    @property
    def peak_bytes(self) -> int:
        """The peak with nothing planned."""
        return baseline_peak_bytes(self.profile)

    @property
    def step_s(self) -> float:
        """Of the planned step; without end where there is no plan."""
        return float("inf") if self.plan is None else self.plan.predicted.step_s

    @property
    def slowdown(self) -> float | None:
        """What the fastest plan takes that holds the memory, where that is more than allowed."""
        return None if self.refusal is None else self.refusal.slowdown

    @property
    def minimum_bytes(self) -> int:
        """The smallest budget, where none that was asked for can be held."""
        if self.refusal is not None and self.refusal.minimum_bytes is not None:
            return self.refusal.minimum_bytes
        return self.peak_bytes if self.plan is None else 0


def tried(profile: Profile, goal: Goal) -> Trial:
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
                return Trial(profile, plan, None)
    try:
        return Trial(profile, make_plan(profile, quick), None)
    except InfeasibleError as refusal:
        return Trial(profile, None, refusal)


def is_cheap(best: Trial, plain_s: float) -> bool:
    """Whether the plan takes hardly longer than the plain step."""
    return best.plan is not None and best.step_s <= (1 + CHEAP) * plain_s


def is_better(found: Trial, best: Trial) -> bool:
    """Whether one way is better than another by more than chance."""
    if found.plan is not None:
        return best.plan is None or found.step_s < (1 - GAIN) * best.step_s
    if best.plan is not None:
        return False
    if found.slowdown is not None:
        return best.slowdown is None or found.slowdown < (1 - GAIN) * best.slowdown
    return best.slowdown is None and found.minimum_bytes < (1 - LESS) * best.minimum_bytes


def nearest(trials: Sequence[Trial]) -> InfeasibleError:
    """Of refusals, the one that asks for the least: more time before more memory."""
    refusals = [(trial, trial.refusal) for trial in trials if trial.refusal is not None]

    def asks(found: tuple[Trial, InfeasibleError]) -> tuple[bool, float]:
        slowdown = found[0].slowdown
        return slowdown is None, found[0].minimum_bytes if slowdown is None else slowdown

    return min(refusals, key=asks)[1]


def choice_of(name: str, before: Trial, after: Trial, how: str = "") -> TechniqueChoice:
    """Whether a technique is taken: what it does to the step by itself, and to the plan."""
    return TechniqueChoice(
        name,
        is_better(after, before),
        how + change(before, after),
        before.peak_bytes - after.peak_bytes,
        after.profile.step_s - before.profile.step_s,
    )


def change(before: Trial, after: Trial) -> str:
    """What another way makes of the step, in bytes and seconds."""
    peaks = [format_bytes(t.peak_bytes) for t in (before, after)]
    words = [f"the unplanned peak goes from {peaks[0]} to {peaks[1]}"]
    if before.plan is not None and after.plan is not None:
        words.append(f"the planned step takes {after.step_s / before.step_s:.3f}x the time")
    elif after.plan is not None:
        words.append("a plan holds the budget now")
    elif before.plan is not None:
        words.append("no plan holds the budget any more")
    elif before.slowdown is not None and after.slowdown is not None:
        words.append(
            f"what the plan takes from {before.slowdown:.3f}x to {after.slowdown:.3f}x the plain "
            "step"
        )
    elif after.slowdown is not None:
        words.append(f"a plan holds the memory now, in {after.slowdown:.3f}x the plain step's time")
    elif before.slowdown is not None:
        words.append("no plan holds the memory any more")
    else:
        least = [format_bytes(t.minimum_bytes) for t in (before, after)]
        words.append(f"the smallest budget from {least[0]} to {least[1]}")
    return ", ".join(words)
