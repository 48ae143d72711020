"""Plans for a range of budgets, none worse than the plan of a smaller one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.api import plan
from memfit.cli.goal import GoalOptions
from memfit.errors import InfeasibleError
from memfit.ir.plan import Plan
from memfit.ir.profile import Profile
from memfit.planning.budget import baseline_peak_bytes
from memfit.planning.placed import held_bytes
from memfit.planning.simulate import Simulator
from memfit.report.fit import Option
from memfit.report.sweep import SweepRow
from memfit.report.terminal import budget_word
from memfit.units import format_bytes, parse_bytes

Progress = Callable[[str], None]
BUDGETS = 10
# Three choices: by their share of the way from the smallest budget to the unplanned step.
CHOICES = {"tight": 0.0, "middle": 0.4, "roomy": 0.75}
TIGHT_MARGIN = 1.02  # the smallest budget of all leaves the machine nothing to differ in


def unplanned_bytes(profile: Profile) -> int:
    """The smallest budget that needs no plan at all."""
    return max(baseline_peak_bytes(profile), held_bytes(Simulator(profile), []))


def spread_budgets(minimum: int, unplanned: int, count: int = BUDGETS) -> list[int]:
    """Budgets from the minimum to the unplanned step's, ascending and evenly spaced."""
    width = max(unplanned - minimum, 0)
    return sorted({minimum + round(width * i / (count - 1)) for i in range(count)})


def sweep(
    profile: Profile,
    budgets: Sequence[int],
    strategies: Sequence[str],
    goal: GoalOptions,
    progress: Progress,
) -> list[SweepRow]:
    """Plan for each budget with each strategy; a faster plan of a smaller budget is kept."""
    plans: list[dict[str, Plan | None]] = [{} for _ in budgets]
    for strategy in strategies:  # one after the other: what a solver learned helps the next budget
        one = goal.for_strategy(strategy, profile.device.type)
        best: Plan | None = None
        for found, budget in zip(plans, budgets, strict=True):
            progress(f"planning for {format_bytes(budget)} by {strategy}")
            best = found[strategy] = _faster(best, _plan_within(profile, budget, one))
    return [SweepRow(budget, found) for budget, found in zip(budgets, plans, strict=True)]


def choices(
    profile: Profile, minimum: int, unplanned: int, goal: GoalOptions, progress: Progress
) -> list[Option]:
    """A few budgets worth asking for, ascending, with their plans."""
    tight = min(round(minimum * TIGHT_MARGIN), max(minimum, unplanned))
    names: dict[int, str] = {}
    for name, part in CHOICES.items():
        size = tight + max(round((unplanned - tight) * part), 0)
        names.setdefault(parse_bytes(budget_word(size)), name)
    rows = sweep(profile, list(names), ["optimal"], goal, progress)
    plans = ((row.budget_bytes, row.plans["optimal"]) for row in rows)
    return [Option(names[size], size, found) for size, found in plans if found is not None]


def _plan_within(profile: Profile, budget: int, goal: GoalOptions) -> Plan | None:
    try:
        # Above the device there is nothing to plan for, and a budget there is refused.
        size = min(budget, profile.device.capacity_bytes)
        return plan(profile, size, **goal.plan_options())
    except InfeasibleError:
        return None


def _faster(one: Plan | None, other: Plan | None) -> Plan | None:
    """The faster of two plans; of equally fast ones, the one with the lower peak."""
    found = [plan for plan in (one, other) if plan is not None]
    return min(found, key=lambda p: (p.predicted.step_s, p.predicted.peak_bytes), default=None)
