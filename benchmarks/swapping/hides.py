"""Only what hides is moved: the lowest budget at which nothing waits for a copy, fitted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from common import say

import memfit
from memfit.errors import InfeasibleError
from memfit.ir.plan import Plan
from memfit.ir.profile import Profile
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime.swap.host_memory import default_host_budget
from swapping.session import Session

STALL_SHARE = 0.01  # of the step may be spent waiting
MOST_SLOWDOWN = 1.03  # what is asked of the measured step
PROBES = 6
ROOMIER = (1.0, 1.05, 1.12)  # the allocator may need more than the live bytes


def run(session: Session, name: str, executor: str) -> dict[str, Any]:
    """One workload by one executor."""
    workload, profile = session.workload(name), session.profile(name, executor)
    found = lowest_hidden(profile)
    if found is None:
        return {"why": "no plan that moves anything hides its copies"}
    for factor in ROOMIER:
        budget = int(found * factor)
        try:
            fitted = memfit.fit_workload(
                workload, budget, profiled=profile, allow="offload", steps=session.steps
            )
        except InfeasibleError as refusal:
            why = refusal.message
            continue
        fitted.undo()
        return {"hidden_budget_bytes": found, **_row(fitted)}
    return {"hidden_budget_bytes": found, "why": why}


def lowest_hidden(profile: Profile) -> int | None:
    """The lowest budget, in live bytes, whose plan hides its copies; None when there is none.

    Found by halving: plans of larger budgets are taken to hide theirs, too.
    """
    live = replace(profile, allocator=None)
    goal = Goal(techniques=("offload",), host_bytes=default_host_budget(), time_limit_s=2.0)

    def probe(budget: int) -> Plan | None:
        try:
            return make_plan(live, replace(goal, budget_bytes=budget))
        except InfeasibleError:
            return None

    assert profile.baseline is not None
    high = profile.baseline.peak_bytes
    low = profile.graph.fixed_bytes
    best = None
    for _ in range(PROBES):
        budget = (low + high) // 2
        plan = probe(budget)
        if plan is not None and hides(plan):
            high = budget
            best = budget if plan.host_bytes else best
        else:
            low = budget
        say(f"  {budget / 2**20:.0f} MB: {_said(plan)}")
    return best


def hides(plan: Plan) -> bool:
    """Whether, by the prediction, next to nothing waits for the plan's copies."""
    waits = plan.predicted.stall_s / plan.baseline_step_s
    return waits <= STALL_SHARE and plan.predicted.step_s <= MOST_SLOWDOWN * plan.baseline_step_s


def _said(plan: Plan | None) -> str:
    if plan is None:
        return "no plan"
    ratio = plan.predicted.step_s / plan.baseline_step_s
    return f"{plan.host_bytes / 2**20:.0f} MB moved, {ratio:.3f}x predicted"


def _row(fitted: memfit.Fitted) -> dict[str, Any]:
    result, plan = fitted.result, fitted.plan
    done = result.swap
    return {
        "budget_bytes": result.budget_bytes,
        "plain_peak_bytes": result.baseline.peak_bytes,
        "static_bytes": result.baseline.static_bytes,
        "predicted_peak_bytes": result.predicted.peak_bytes,
        "measured_peak_bytes": result.measured.peak_bytes,
        "measured_reserved_bytes": result.measured.peak_reserved_bytes,
        "retries": result.measured.retries,
        "predicted_ratio": plan.predicted.step_s / plan.baseline_step_s,
        "predicted_hidden_share": _hidden(plan),
        "predicted_step_s": plan.predicted.step_s,
        "measured_step_s": result.measured.step_s,
        "measured_ratio": result.measured.time_ratio,
        "same_code_ratio": result.measured.same_code_ratio,
        "hidden_share": None if done is None else done.hidden_share,
        "moved_bytes": 0 if done is None else done.per_step(done.moved_bytes),
        "out_gb_per_s": None if done is None else done.out_gb_per_s,
        "in_gb_per_s": None if done is None else done.in_gb_per_s,
        "stalled_s": None if done is None else done.per_step(done.stalled_s),
        "rounds": result.rounds,
        "trim": plan.trim,
        "numerics": vars(result.numerics),
    }


def _hidden(plan: Plan) -> float:
    copy_s = plan.predicted.copy_s
    return max(0.0, 1 - plan.predicted.stall_s / copy_s) if copy_s > 0 else 1.0
