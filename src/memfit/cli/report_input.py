"""From a fit, or from the files of one, to what a report shows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from memfit import __version__
from memfit.cli.goal import GoalOptions, refuse_together
from memfit.cli.session import Session
from memfit.cli.target import Target
from memfit.cli.unfinished import WITHOUT_RESULT, ended_report, nearest_plan, unfinished
from memfit.errors import (
    PlanFileError,
    ProfileFileError,
    RunFileError,
    UsageError,
)
from memfit.ir.plan import Plan
from memfit.ir.profile import Profile
from memfit.ir.run_file import RunFile
from memfit.planning.replay import replay, replay_plan
from memfit.planning.simulate import Simulator
from memfit.planning.strategies import STRATEGIES
from memfit.report.run_report import EndedReport, RunReport
from memfit.units import format_bytes

PEAKS_APART = 0.01  # of the predicted peak: a plan that is further off belongs to another profile


def curve_strategies(text: str | None) -> list[str]:
    """The strategies of the curve; UsageError for one there is not."""
    if text is None:
        return list(STRATEGIES)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in STRATEGIES:
            raise UsageError(
                f"--curve: unknown strategy {name!r}", hint=f"some of: {','.join(STRATEGIES)}"
            )
    return names


def from_fit(
    session: Session, what: Target, goal: GoalOptions, accumulate: int, steps: int
) -> RunReport | EndedReport:
    """Fit a target, as `memfit fit` does."""
    from memfit import api
    from memfit.cli.fit import run_file
    from memfit.measure.device import device_facts

    if not goal.aims:
        raise UsageError(
            "there is no budget to fit into",
            hint=f"give --budget B; {what.command('fit')} shows which are possible",
        )
    workload = None
    try:
        session.progress(f"building {what.name}")
        workload = what.build()
        goal.techniques_on(workload.device.type)
        fitted = api.fit_workload(
            workload,
            goal.budget_on(device_facts(workload.device)),
            steps=steps,
            segments=goal.segments or None,
            accumulate=accumulate,
            progress=session.progress,
            **goal.plan_options(),
        )
    except WITHOUT_RESULT as error:
        return _without_result(session, unfinished(error, what.name, workload))
    fitted.undo()
    return _collect(session, fitted.profile, fitted.plan, run_file(fitted))


def _without_result(session: Session, run: RunFile) -> RunReport | EndedReport:
    """What a fit left that came to no result: the nearest plan, where there is a profile."""
    assert run.refused is not None
    profile, plan = run.profile, None
    if profile is not None:
        plan = nearest_plan(profile, run.refused)
    if profile is None or plan is None:
        return ended_report(run)
    return replace(_collect(session, profile, plan, run), refused=run.refused)


def from_files(
    session: Session,
    profile_file: Path | None,
    plan_file: Path | None,
    result_file: Path | None,
    goal: GoalOptions,
) -> RunReport | EndedReport:
    """Read a profile, a plan and a result, or take those that the result has in it.

    Without a plan one is made for the goal.
    """
    run = None if result_file is None else RunFile.load(result_file)
    if run is not None and run.refused is not None:
        others = {"--profile": profile_file, "--plan": plan_file}
        given = [option for option, path in others.items() if path is not None]
        refuse_together([str(result_file), *given, *goal.given, *goal.planning_options])
        return _without_result(session, run)
    profile = run.profile if run is not None else None
    profile = profile if profile_file is None else Profile.load(profile_file)
    if profile is None:
        raise ProfileFileError(
            f"there is no profile in {str(result_file)!r}: {_older(run)}"
            if run is not None
            else "a plan alone has no memory over time: its profile is missing",
            hint="add --profile DIR/profile.json of memfit profile TARGET -o DIR",
        )
    plan = run.plan if run is not None else None
    plan = plan if plan_file is None else Plan.load(plan_file)
    if plan is None:
        if run is not None:
            raise RunFileError(
                f"there is no plan in {str(result_file)!r}: {_older(run)}",
                hint="add --plan FILE, or fit again with -o run.json",
            )
        plan = _planned(session, profile, goal)
    elif given := [*goal.given, *goal.planning_options]:
        raise UsageError(
            f"{', '.join(given)} say how to make a plan, but a file gives one",
            hint="leave out --plan and --result, or the others",
        )
    result = None if run is None else run.result
    ran = profile.workload if result is None else result.workload
    for part in ("name", "model", "optimizer"):  # a plan may run a batch in parts
        fitted, profiled = (w.get(part) for w in (ran, profile.workload))
        if fitted != profiled:
            raise RunFileError(
                f"the result is of the {part} {fitted}, the profile of {profiled}",
                hint="give files of one fit",
            )
    return _collect(session, profile, plan, run)


def with_curve(
    session: Session,
    report: RunReport,
    goal: GoalOptions,
    strategies: Sequence[str],
    points: int,
) -> RunReport:
    """The report with plans for a range of budgets by each strategy.

    `optimal` may use what the plan was allowed to, the others what they are made of; host memory
    is limited to what the device has, unless the goal says otherwise.
    """
    from memfit.cli.sweep import spread_budgets, sweep, unplanned_bytes
    from memfit.planning.techniques import ACTIVATIONS, NEEDS
    from memfit.report.sweep import SweepRow

    profile = report.profile
    host = goal.host_budget or str(profile.device.capacity_bytes)
    free = GoalOptions(None, None, None, None, None, None, [], [], host_budget=host)
    free = replace(free, min_tensor_bytes=goal.min_tensor_bytes)
    used = [name for name in ACTIVATIONS if name in report.plan.techniques]
    optimal = replace(free, allow=sorted({"recompute", *used}))
    optimal = optimal if "offload" in used else replace(optimal, host_budget=None)
    session.progress("looking for the smallest budget")
    least = min(optimal.minimum_bytes(profile), report.plan.minimum_feasible_bytes)
    budgets = spread_budgets(least, unplanned_bytes(profile), points)
    if report.plan.budget_bytes is not None and least < report.plan.budget_bytes < budgets[-1]:
        budgets = sorted({*budgets, report.plan.budget_bytes})  # the curve goes by this plan
    found: list[dict[str, Plan | None]] = [{} for _ in budgets]
    for name in strategies:
        one = free if "offload" in NEEDS.get(name, ()) else replace(free, host_budget=None)
        one = optimal if name == "optimal" else one
        rows = sweep(profile, budgets, [name], one, session.progress)
        for plans, row in zip(found, rows, strict=True):
            plans.update(row.plans)
    curve = tuple(SweepRow(size, plans) for size, plans in zip(budgets, found, strict=True))
    return replace(report, curve=curve)


def _planned(session: Session, profile: Profile, goal: GoalOptions) -> Plan:
    from memfit import api

    if not goal.aims:
        raise UsageError(
            "there is neither a plan nor a budget to make one for",
            hint="add --plan FILE or --budget B",
        )
    session.progress("planning")
    return api.plan(profile, goal.budget_on(profile.device), **goal.plan_options())


def _collect(session: Session, profile: Profile, plan: Plan, run: RunFile | None) -> RunReport:
    """What a report shows of a plan for this profile; PlanFileError if it is for another."""
    _check_plan(profile, plan)
    session.progress("replaying the step")
    simulator = Simulator(profile, plan.smallest_move_bytes, ("recompute", "offload"))
    after = replay_plan(simulator, plan)
    plain = None if run is None else run.plain
    before = replay(simulator if plain is None else Simulator(plain), [])
    expected = plan.predicted.peak_bytes
    if abs(after.peak_bytes - expected) > PEAKS_APART * expected:
        raise PlanFileError(
            f"the plan expects a peak of {format_bytes(expected)}, and with this profile it comes "
            f"to {format_bytes(after.peak_bytes)}: it was made from another profile",
            hint="give the profile that the plan was made from, or plan again: --budget B",
        )
    return RunReport(
        profile=profile,
        plan=plan,
        before=before,
        after=after,
        command="",
        made=time.strftime("%Y-%m-%d %H:%M %z"),
        memfit=__version__,
        result=None if run is None else run.result,
        run_command="" if run is None else run.command,
        plain=plain,
    )


def _check_plan(profile: Profile, plan: Plan) -> None:
    for what, planned, profiled in (
        ("model", plan.fingerprint, profile.fingerprint),
        ("workload", plan.workload, profile.workload),
        ("executor", plan.executor, profile.executor),
        ("set-up", plan.setup, profile.setup),
        ("segments", plan.route, [(c.module, c.number, c.visits) for c in profile.graph.calls]),
        (
            "graphs",
            {v.graph for v in plan.variants} - {g.key for g in profile.graphs},
            set[str](),
        ),
    ):
        if planned != profiled:
            raise PlanFileError(
                f"the plan is for another {what} than the profile: {_shown(planned)}, not "
                f"{_shown(profiled)}",
                hint="give files of one fit (memfit fit -o run.json has all in one), or make the "
                "plan from the profile: --profile FILE --budget B",
            )


def _shown(value: object, most: int = 120) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _older(run: RunFile | None) -> str:
    by = f"memfit {run.memfit}" if run is not None and run.memfit else "memfit fit --json"
    return f"it was written by {by}"
