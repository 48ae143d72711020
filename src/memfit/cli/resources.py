"""`memfit resources`: what a run takes of the machine before a plan and with it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from memfit.cli import options
from memfit.cli.goal import GoalOptions
from memfit.cli.output_file import check_file, write_json, write_text
from memfit.cli.session import opened
from memfit.cli.target import Target
from memfit.errors import UsageError


def resources(
    target: options.TargetName,
    budget: options.Budget = None,
    utilization: options.Utilization = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", metavar="N", min=1, help="Samples of an epoch."),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option("--epochs", metavar="N", min=1, help="Epochs of the run.")
    ] = None,
    allow: options.Allow = None,
    host_budget: options.HostBudget = None,
    executor: options.Executor = None,
    accumulate: options.Accumulate = 1,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Steps of each kind to time.")
    ] = 10,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write it as JSON, or as Markdown."),
    ] = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    device: options.Device = None,
    fields: options.Fields = None,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Say what training TARGET takes of this machine before a plan and with it.

    Memory of device and host, storage of a checkpoint, time of a step, an epoch and the run: each
    number is marked measured, projected or not measured.
    """
    with opened(as_json=as_json, verbose=verbose) as session:
        what = Target(target, batch, seq, dtype, optimizer, device, fields or [])
        goal = GoalOptions(
            budget,
            utilization,
            None,
            None,
            None,
            None,
            [],
            allow or [],
            executor=executor,
            host_budget=host_budget,
        )
        _check(goal, samples, epochs, output)
        session.progress("loading torch")
        from memfit import __version__, api
        from memfit.measure.device import device_facts
        from memfit.observe.resources import resources as take_stock
        from memfit.report.resources import resources_markdown, resources_report

        session.progress(f"building {target}")
        workload = what.build()
        fitted = api.fit_workload(
            workload,
            goal.budget_on(device_facts(workload.device)),
            steps=steps,
            accumulate=accumulate,
            progress=session.progress,
            **goal.plan_options(),
        )
        session.progress("watching the host's memory")
        found = take_stock(fitted, workload, samples=samples, epochs=epochs)
        if output is not None and output.suffix == ".md":
            write_text(output, resources_markdown(found))
        elif output is not None:
            about = {"memfit": __version__, "command": shlex.join(["memfit", *sys.argv[1:]])}
            write_json(output, {"schema_version": 1, **found.to_json(), **about})
        if session.as_json:
            session.emit(found.to_json())
        else:
            session.show(*resources_report(found))
        if not fitted.result.numerics.kept:
            raise typer.Exit(1)


def _check(goal: GoalOptions, samples: int | None, epochs: int | None, output: Path | None) -> None:
    if not goal.given:
        raise UsageError(
            "there is no budget to compare with",
            hint="give --budget B, or --utilization 0.8 for 80 % of the device",
        )
    if epochs is not None and samples is None:
        raise UsageError("--epochs without --samples", hint="say how many samples an epoch has")
    goal.check()
    check_file(output)
