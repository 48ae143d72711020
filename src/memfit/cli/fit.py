"""`memfit fit`: plan, run under the budget, verify; without a goal, say what could be asked for."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli import options
from memfit.cli.goal import GoalOptions, refuse_together
from memfit.cli.output_file import check_file, write_json
from memfit.cli.session import Session, opened
from memfit.cli.starting import started
from memfit.cli.target import Target, accumulating
from memfit.errors import UsageError

if TYPE_CHECKING:
    from memfit.fitted import Fitted
    from memfit.ir.plan import Plan
    from memfit.ir.run_file import RunFile
    from memfit.workload import Workload


def fit(
    target: options.TargetName,
    budget: options.Budget = None,
    utilization: options.Utilization = None,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="Run this plan instead of making one.",
            rich_help_panel="Goal",
        ),
    ] = None,
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
    cuda_graphs: options.CudaGraphs = False,
    references: options.References = None,
    preset: options.Preset = None,
    config: options.ConfigFile = None,
    accumulate: options.AccumulateOrPreset = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Steps of each kind to time.")
    ] = 10,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write result, plan and profile as JSON."
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
    """Fit the training step of TARGET into a budget, and verify it on this machine.

    Without --budget (or --utilization, --activation-reduction, --plan) it measures the step and
    prints the budgets to choose from.
    """
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
        plan = _checked(goal, plan_file, output)
        if plan is not None and cuda_graphs:
            raise UsageError(
                "--cuda-graphs says how to make a plan, but --plan gives one",
                hint="leave out --plan or the other",
            )
        if plan is not None:
            goal = replace(goal, executor=plan.executor)
        session.progress("loading torch")
        from memfit import api
        from memfit.measure.device import device_facts

        session.progress(f"building {target}")
        with _leaving(session, target, output) as built:
            workload = what.build()
            built.append(workload)
            techniques = goal.techniques_on(workload.device.type)
            if plan is None and not goal.aims:
                _show_choices(session, what, workload, goal, batches)
                return
            fitted = api.fit_workload(
                workload,
                goal.budget_on(device_facts(workload.device)),
                plan=plan,
                steps=steps,
                segments=goal.segments or None,
                accumulate=batches,
                cuda_graphs=cuda_graphs,
                references=[name.strip() for name in (references or "").split(",") if name.strip()],
                progress=session.progress,
                **goal.plan_options(),
            )
        could_move = plan is None and "offload" in techniques
        # A plan that is given says itself what was tried for it.
        left_out = {} if plan is not None else goal.left_out_on(workload.device.type)
        _show(
            session,
            what,
            fitted,
            goal,
            output,
            could_move=could_move,
            explain=explain,
            left_out=left_out,
        )


def _checked(goal: GoalOptions, plan_file: Path | None, output: Path | None) -> Plan | None:
    """Refuse what cannot work before anything is built; return the plan of the file, if any."""
    refuse_together([*goal.given, *(["--plan"] if plan_file is not None else [])])
    if plan_file is not None and (extra := goal.planning_options):
        raise UsageError(
            f"{', '.join(extra)} say how to make a plan, but --plan gives one",
            hint="leave out --plan or the others",
        )
    goal.check()
    check_file(output)
    if plan_file is None:
        return None
    from memfit.ir.plan import Plan

    return Plan.load(plan_file)


@contextmanager
def _leaving(session: Session, target: str, output: Path | None) -> Iterator[list[Workload]]:
    """Leave a run file of a fit that comes to no result, too; the list takes what is fitted."""
    from memfit.cli.unfinished import WITHOUT_RESULT, unfinished

    built: list[Workload] = []
    try:
        yield built
    except WITHOUT_RESULT as error:
        if output is not None:
            write_json(output, unfinished(error, target, built[0] if built else None).to_json())
            if not session.as_json:
                session.line(f"wrote {output}; next: {_report_command(output)}")
        raise


def _report_command(output: Path) -> str:
    """What makes a page of a run file."""
    named = [str(output)] if output.suffix == ".json" else ["--result", str(output)]
    return shlex.join(["memfit", "report", *named, "-o", str(output.with_suffix(".html"))])


def _show(
    session: Session,
    what: Target,
    fitted: Fitted,
    goal: GoalOptions,
    output: Path | None,
    *,
    could_move: bool,
    explain: bool,
    left_out: Mapping[str, str],
) -> None:
    from memfit.report.fit import fit_report, summary_line

    result = fitted.result
    if output is not None:
        write_json(output, run_file(fitted).to_json())
    if session.as_json:
        session.emit(result.to_json())
    else:
        rates = fitted.profile.copy if could_move else None
        shown = fit_report(result, fitted.plan, rates, explain=explain, left_out=left_out)
        session.show(*shown)
        same = [*goal.sweep_words(), *accumulating(fitted.plain.accumulate)]
        following = what.command("plan", "--sweep", *same)
        if output is not None:
            following = _report_command(output)
        session.line(summary_line(result, following))
    if not result.numerics.kept:
        raise typer.Exit(1)


def run_file(fitted: Fitted) -> RunFile:
    """What a fit did, with the command line it was asked for by."""
    from memfit import __version__
    from memfit.ir.run_file import RunFile

    command = shlex.join(["memfit", *sys.argv[1:]])
    profile, plain = fitted.profile, fitted.plain
    changed = (profile.setup, profile.split) != (plain.setup, plain.split)
    shown = plain if changed else None
    return RunFile(fitted.result, fitted.plan, profile, shown, command, __version__)


def _show_choices(
    session: Session, what: Target, workload: Workload, goal: GoalOptions, accumulate: int
) -> None:
    from memfit import api
    from memfit.cli.sweep import choices, unplanned_bytes
    from memfit.ir.codec import to_data
    from memfit.report.fit import choices_lines, choices_table
    from memfit.report.terminal import budget_word, headline, note_lines

    planned, apart = goal.for_many_budgets()
    profile = api.profile(
        workload,
        segments=goal.segments or None,
        executor=goal.executor,
        accumulate=accumulate,
        progress=session.progress,
    )
    session.progress("looking for the feasible range")
    minimum, unplanned = planned.minimum_bytes(profile), unplanned_bytes(profile)
    found = choices(profile, minimum, unplanned, planned, session.progress)
    notes = [*apart, *profile.notes]
    if session.as_json:
        session.emit(
            {
                "workload": profile.workload,
                "device": to_data(profile.device),
                "minimum_feasible_bytes": minimum,
                "baseline": {
                    "peak_bytes": unplanned,
                    "static_bytes": profile.graph.fixed_bytes,
                    "step_s": profile.step_s,
                    "measured": profile.baseline is not None,
                },
                "choices": [
                    {
                        "name": choice.name,
                        "budget_bytes": choice.budget_bytes,
                        "predicted": to_data(choice.plan.predicted),
                        "slowdown": choice.plan.predicted.step_s / choice.plan.baseline_step_s,
                        "offloaded_bytes": choice.plan.offloaded_bytes,
                    }
                    for choice in found
                ],
                "notes": notes,
            }
        )
        return
    session.show(headline(profile.workload, {"name": profile.device.name}))
    session.show(*choices_lines(profile, minimum, unplanned), *note_lines(notes))
    if minimum >= unplanned:
        session.line(f"nothing to save; next: {what.command('profile')}")
        return
    if not found:
        command = what.command("plan", "--sweep", *planned.setup_words(), *accumulating(accumulate))
        limit = f"{goal.max_slowdown:g}x the plain step's time"
        session.line(f"no plan found within {limit}, nothing fitted; next: {command}")
        return
    session.show(choices_table(found))
    middle = found[len(found) // 2].budget_bytes
    same = [*goal.limited_words(), *accumulating(accumulate)]
    command = what.command("fit", "--budget", budget_word(middle), *same)
    session.line(f"no budget given, nothing fitted; next: {command}")
