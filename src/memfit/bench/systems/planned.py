"""memfit itself: a plan for a budget, run and verified, with what it promised beside it."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from memfit import api
from memfit.bench.systems.catalogue import memfit_options
from memfit.bench.systems.prepared import Prepared, Setting, total_static
from memfit.fitted import Fitted
from memfit.ir.bench import Planned
from memfit.ir.plan import KEEP
from memfit.ir.profile import Profile
from memfit.measure.cuda_allocator import prefer_expandable_segments
from memfit.measure.kept_copies import reused
from memfit.measure.step import run_step
from memfit.measure.timing import Inside
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime.apply import Applied
from memfit.runtime.setup import Setup
from memfit.verify.budget import run_once
from memfit.workload import Workload


def prepare(setting: Setting, family: str, argument: str) -> Prepared:
    """Fit the workload, then hand over the planned step; InfeasibleError when no plan holds."""
    options = fit_options(family, argument)
    executor, graphs = options.get("executor"), options.pop("launch", None) == "graphs"
    begun = time.perf_counter()
    with reused():
        found = setting.profile(executor, graphs=graphs)
        profile_s = time.perf_counter() - begun
        handed = found.by != setting.shared.system
        if handed:
            warm_up(setting.workload, found.profile)
        fitted = api.fit_workload(
            setting.workload,
            profiled=found.profile,
            steps=setting.steps,
            progress=setting.say,
            **options,
        )
    fit_s = time.perf_counter() - begun
    fitted.undo()
    work = partial(run_step, fitted.workload, accumulate=fitted.plan.split)
    applied = fitted.applied
    return Prepared(
        Inside(lambda: applied, work),
        partial(total_static, setting.workload),
        apart=fitted.plan.trim,
        seen=applied.whole,
        facts={
            "planned": planned_facts(fitted, fit_s, profile_s, found.by if handed else None),
            "breakdown": dict(fitted.plan.predicted.categories),
        },
    )


def fit_options(family: str, argument: str) -> dict[str, Any]:
    """The keyword arguments of the fit that a system's name asks for."""
    goal, options = memfit_options(argument)
    chosen: dict[str, Any] = dict(options)
    if family == "memfit-cut":
        return {"budget": None, "activation_reduction": float(goal[:-1]) / 100, **chosen}
    if goal == "none":
        return {"budget": None, "strategy": "none", **chosen}
    return {"budget": goal, **chosen}


def warm_up(workload: Workload, profile: Profile, setup: Setup | None = None) -> None:
    """Set the allocator and run the unplanned step, as making the profile here would have."""
    prefer_expandable_segments(workload.device)
    kept = make_plan(profile, Goal(strategy="none")).unplanned()
    run_once(workload, Applied(kept, workload.model, setup))


def planned_facts(
    fitted: Fitted, fit_s: float, profile_s: float, profile_of: str | None
) -> Planned:
    """Promise and measurement, from the fit's own result."""
    result, plan = fitted.result, fitted.plan
    return Planned(
        budget_bytes=result.budget_bytes,
        predicted_peak_bytes=result.predicted.peak_bytes,
        measured_peak_bytes=result.measured.peak_bytes,
        predicted_reserved_bytes=result.predicted.peak_reserved_bytes,
        measured_reserved_bytes=result.measured.peak_reserved_bytes,
        unplanned_peak_bytes=result.baseline.peak_bytes,
        static_bytes=result.baseline.static_bytes,
        predicted_step_s=result.predicted.step_s,
        predicted_ratio=result.predicted.time_ratio,
        measured_ratio=result.measured.time_ratio,
        unplanned_step_s=result.baseline.step_s,
        gap=result.predicted.gap,
        executor=plan.executor,
        techniques=tuple(plan.techniques),
        segments=len(plan.segments),
        chosen=tuple(s.name for s in plan.segments if s.decision != KEEP),
        numbers_agree=result.numerics.kept,
        bitwise=result.numerics.bitwise_vs_unplanned,
        numbers_note=result.numerics.note,
        fit_s=fit_s,
        profile_s=profile_s,
        proof_s=fitted.result.proof_s,
        profile_of=profile_of,
        notes=tuple(result.notes),
    )
