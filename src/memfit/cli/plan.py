"""`memfit plan`: what a budget would take, segment by segment; or many budgets side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli import options
from memfit.cli.goal import GoalOptions
from memfit.cli.output_file import check_file, write_json, writing
from memfit.cli.session import SCHEMA_VERSION, Session, opened
from memfit.cli.starting import started
from memfit.cli.target import Target, accumulating
from memfit.errors import UsageError

if TYPE_CHECKING:
    from memfit.ir.plan import Plan
    from memfit.ir.profile import Profile


def plan(
    target: options.TargetName,
    budget: options.Budget = None,
    utilization: options.Utilization = None,
    activation_reduction: options.ActivationReduction = None,
    max_slowdown: options.MaxSlowdown = None,
    strategy: options.Strategy = None,
    interval: options.Interval = None,
    segments: options.Segments = None,
    allow: options.Allow = None,
    force: options.Force = None,
    host_budget: options.HostBudget = None,
    executor: options.Executor = None,
    min_tensor_bytes: options.MinTensorBytes = None,
    preset: options.Preset = None,
    config: options.ConfigFile = None,
    accumulate: options.AccumulateOrPreset = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="Plan for ten budgets from the smallest to the plain step's; --strategy "
            "optimal,ratio compares strategies.",
        ),
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="List every segment by itself.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the plan as JSON, for fit --plan."
        ),
    ] = None,
    decisions: Annotated[
        Path | None,
        typer.Option(
            "--decisions",
            metavar="FILE",
            help="Write what happens to every tensor as CSV; with reasons, as JSON, for a .json.",
        ),
    ] = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    device: options.Device = None,
    fields: options.Fields = None,
    explain: options.Explain = False,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Plan the training step of TARGET for a budget, without running the plan."""
    with opened(as_json=as_json, verbose=verbose) as session:
        what = Target(target, batch, seq, dtype, optimizer, device, fields or [])
        goal = GoalOptions(
            budget,
            utilization,
            activation_reduction,
            max_slowdown,
            strategy,
            interval,
            segments or [],
            allow or [],
            executor,
            min_tensor_bytes,
            host_budget,
            force or [],
        )
        what, goal, batches = started(what, goal, accumulate, preset, config)
        planned, notes = goal.for_many_budgets() if sweep else (goal, [])
        _check(planned, sweep, {"--output": output, "--decisions": decisions})
        session.progress("loading torch")
        from memfit import api

        session.progress(f"building {target}")
        workload = what.build()
        goal.techniques_on(workload.device.type)  # refuses what contradicts itself there
        profile = api.profile(
            workload,
            segments=goal.segments or None,
            executor=goal.executor,
            accumulate=batches,
            progress=session.progress,
        )
        session.progress("planning")
        if sweep:
            _show_sweep(session, what, profile, planned, goal.limited_words(), notes)
        else:
            made = api.plan(
                workload,
                goal.budget_on(profile.device),
                profiled=profile,
                segments=goal.segments or None,
                progress=session.progress,
                **goal.plan_options(),
            )
            _show_plan(session, what, profile, goal, made, output, decisions, every, explain)


def _check(goal: GoalOptions, sweep: bool, files: Mapping[str, Path | None]) -> None:
    if sweep:
        extra = [*goal.given, *(option for option, path in files.items() if path is not None)]
        if extra:
            raise UsageError(
                f"--sweep goes over many budgets: {', '.join(extra)} is for one plan",
                hint="leave out one of them; --json prints a sweep as data",
            )
    elif not goal.aims:
        raise UsageError(
            "there is no budget to plan for",
            hint="give --budget B, or --sweep to see what budgets would cost",
        )
    goal.check(several_strategies=sweep)
    for path in files.values():
        check_file(path)


def _show_plan(
    session: Session,
    what: Target,
    profile: Profile,
    goal: GoalOptions,
    made: Plan,
    output: Path | None,
    decisions: Path | None,
    every: bool,
    explain: bool,
) -> None:
    from memfit.ir.codec import to_data
    from memfit.report.plan import plan_report, summary_line

    if output is not None:
        write_json(output, to_data(made))
    if decisions is not None:
        _write_decisions(made, decisions)
    if session.as_json:
        session.emit(to_data(made))
        return
    rates = profile.copy if "offload" in goal.techniques_on(profile.device.type) else None
    shown = plan_report(
        made,
        profile.device.name,
        rates,
        every=every,
        explain=explain,
        left_out=goal.left_out_on(profile.device.type),
    )
    session.show(*shown)
    steps = ["--plan", str(output)] if output is not None else goal.words()
    next_command = what.command("fit", *steps, *accumulating(profile.accumulate))
    session.line(summary_line(made, next_command))


def _write_decisions(plan: Plan, path: Path) -> None:
    from memfit.report.csv import write_csv
    from memfit.report.decisions import DECISION_COLUMNS, decision_rows, explained_rows

    if path.suffix == ".json":
        rows = list(explained_rows(plan))
        write_json(path, {"schema_version": SCHEMA_VERSION, "decisions": rows})
    else:
        with writing(path):
            write_csv(path, decision_rows(plan), DECISION_COLUMNS)


def _show_sweep(
    session: Session,
    what: Target,
    profile: Profile,
    goal: GoalOptions,
    same: Sequence[str],
    notes: Sequence[str],
) -> None:
    """Show plans for many budgets; the `same` words go into the next command."""
    from memfit.cli.sweep import spread_budgets, sweep, unplanned_bytes
    from memfit.ir.codec import to_data
    from memfit.report.sweep import sweep_data, sweep_table
    from memfit.report.terminal import budget_word, headline, note_lines

    session.progress("looking for the smallest budget")
    minimum, unplanned = goal.minimum_bytes(profile), unplanned_bytes(profile)
    strategies = (goal.strategy or "optimal").split(",")
    rows = sweep(profile, spread_budgets(minimum, unplanned), strategies, goal, session.progress)
    if session.as_json:
        session.emit(
            {
                "workload": profile.workload,
                "device": to_data(profile.device),
                "minimum_feasible_bytes": minimum,
                "baseline": {"peak_bytes": unplanned, "step_s": profile.step_s},
                "budgets": sweep_data(rows),
                "notes": list(notes),
            }
        )
        return
    session.show(headline(profile.workload, {"name": profile.device.name}))
    session.show(sweep_table(rows, unplanned, profile.step_s), *note_lines(notes))
    planned = [row for row in rows if any(row.plans.values())] or rows
    middle = planned[len(planned) // 2].budget_bytes
    next_command = what.command(
        "fit",
        "--budget",
        budget_word(middle),
        *same,
        *accumulating(profile.accumulate),
    )
    session.line(f"predicted, not run; next: {next_command}")
