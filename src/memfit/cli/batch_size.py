"""`memfit batch-size`: the largest batch within a budget, and the fastest."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from memfit.cli import options
from memfit.cli.goal import GoalOptions
from memfit.cli.session import opened
from memfit.cli.target import Target
from memfit.errors import UsageError


def batch_size(
    target: options.TargetName,
    budget: options.Budget = None,
    utilization: options.Utilization = None,
    with_plan: Annotated[
        bool,
        typer.Option("--with-plan", help="Also find the largest batch that a plan allows."),
    ] = False,
    allow: options.Allow = None,
    executor: options.Executor = None,
    max_size: Annotated[
        int, typer.Option("--max-size", metavar="N", min=1, help="Look no further than this.")
    ] = 65536,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Steps to time at each size.")
    ] = 10,
    batch: options.Batch = None,
    seq: options.Seq = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    device: options.Device = None,
    fields: options.Fields = None,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Find the largest batch of TARGET's plain step within a budget, in at most five runs.

    The example batch is repeated or cut along its first dimension. Every size named was run under
    the budget.
    """
    with opened(as_json=as_json, verbose=verbose) as session:
        what = Target(target, batch, seq, dtype, optimizer, device, fields or [])
        goal = GoalOptions(
            budget, utilization, None, None, None, None, [], allow or [], executor=executor
        )
        _check(goal, with_plan)
        session.progress("loading torch")
        from memfit.report.batch_size import batch_size_report, summary_line
        from memfit.report.terminal import budget_word
        from memfit.train.batch_size.find import find_batch_size

        session.progress(f"building {target}")
        workload = what.build()
        planning = goal.plan_options()
        found = find_batch_size(
            workload,
            budget,
            utilization=utilization,
            with_plan=with_plan,
            allow=planning["allow"],
            executor=executor,
            max_size=max_size,
            steps=steps,
            progress=session.progress,
        )
        if session.as_json:
            session.emit(found.to_json())
            return
        session.show(*batch_size_report(found))
        best = found.planned or found.largest
        words = ["--budget", budget_word(found.budget_bytes), *goal.setup_words()]
        session.line(summary_line(found, _next(what, best.size, words)))


def _next(what: Target, size: int, words: list[str]) -> str:
    """The command that fits this batch, and what has to be done before it."""
    if what.takes_batch():
        return replace(what, batch=size).command("fit", *words)
    return f"make the batch of {what.name} {size}, then {what.command('fit', *words)}"


def _check(goal: GoalOptions, with_plan: bool) -> None:
    if not goal.given:
        raise UsageError(
            "there is no budget to fill",
            hint="give --budget B, or --utilization 0.8 for 80 % of the device",
        )
    if goal.planning_options and not with_plan:
        raise UsageError(
            f"{', '.join(goal.planning_options)} say how to plan, but no plan is asked for",
            hint="add --with-plan, or leave them out",
        )
    goal.check()
