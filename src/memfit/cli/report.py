"""`memfit report`: a fit as one HTML file, and as a trace, a flame graph and plots."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from memfit.cli import options
from memfit.cli.goal import GoalOptions, refuse_together
from memfit.cli.output_file import check_file, make_folder, write_json, write_text
from memfit.cli.session import Session, opened
from memfit.cli.starting import started
from memfit.cli.target import Target
from memfit.errors import DeviceMemoryError, UsageError

if TYPE_CHECKING:
    from memfit.report.run_report import EndedReport, RunReport

_FILES, _OUTPUT = "From files, instead of TARGET", "Output"


@dataclass(frozen=True)
class Outputs:
    """The files to write, any of them."""

    page: Path | None
    trace: Path | None
    flame: Path | None
    plots: Path | None

    def next_words(self) -> str:
        """What to do with the first of them."""
        viewers = {
            "in a browser": self.page,
            "in ui.perfetto.dev": self.trace,
            "in speedscope.app": self.flame,
            "and look at the plots": self.plots,
        }
        viewer, path = next((v, p) for v, p in viewers.items() if p is not None)
        return f"open {shlex.quote(str(path))} {viewer}"


def report(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[TARGET|RUN.json]",
            help="What to fit: as for memfit fit; or what memfit fit -o wrote (as --result).",
            show_default=False,
        ),
    ] = None,
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
    profile_file: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="FILE",
            help="profile.json of memfit profile -o, or packed by gzip; with --plan, --budget or "
            "--result.",
            rich_help_panel=_FILES,
        ),
    ] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="The plan of memfit plan -o for that profile.",
            rich_help_panel=_FILES,
        ),
    ] = None,
    result_file: Annotated[
        Path | None,
        typer.Option(
            "--result",
            metavar="FILE",
            help="run.json of memfit fit -o, which has its plan and profile in it; gzip may have "
            "packed it.",
            rich_help_panel=_FILES,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the report as HTML.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Write compute and copies as a trace for ui.perfetto.dev (JSON).",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    flame: Annotated[
        Path | None,
        typer.Option(
            "--flame",
            metavar="FILE",
            help="Write bytes by module as a flame graph for speedscope.app (JSON).",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            "--plots",
            metavar="DIR",
            help="Write plots for papers there, PNG and SVG (needs matplotlib).",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    curve: Annotated[
        str | None,
        typer.Option(
            "--curve",
            metavar="S,S",
            help="Strategies in the curve of budget against time; left out: every one.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    no_curve: Annotated[
        bool,
        typer.Option("--no-curve", help="Leave that curve out.", rich_help_panel=_OUTPUT),
    ] = False,
    points: Annotated[
        int,
        typer.Option(
            "--points",
            metavar="N",
            min=2,
            help="Budgets in that curve.",
            rich_help_panel=_OUTPUT,
        ),
    ] = 8,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Steps of each kind to time.")
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
    """Write a report of a fit: one HTML file that needs no network, and files for other viewers.

    With TARGET the step is fitted into the budget first; without, the report is made from what
    `profile`, `plan` and `fit` wrote, on any machine.
    """
    with opened(as_json=as_json, verbose=verbose) as session:
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
        outputs = Outputs(output, trace, flame, plots)
        if target is not None and target.endswith((".json", ".json.gz")):
            refuse_together([target, *(["--result"] if result_file is not None else [])])
            result_file, target = Path(target), None
        what = Target(target or "", batch, seq, dtype, optimizer, device, fields or [])
        files = {"--profile": profile_file, "--plan": plan_file, "--result": result_file}
        given = [option for option, path in files.items() if path is not None]
        if not what.name and (preset is not None or config is not None):
            raise UsageError(
                "--preset and --config say how to fit, and there is no TARGET",
                hint="leave them out, or give a TARGET",
            )
        _check(outputs, what, goal, given)
        session.progress("loading torch")
        from memfit.cli.report_input import curve_strategies, from_files, from_fit, with_curve
        from memfit.report.run_report import EndedReport

        strategies = [] if no_curve else curve_strategies(curve)
        if target is not None:
            _refuse_data_file(target)
            what, goal, batches = started(what, goal, accumulate, preset, config)
            found = from_fit(session, what, goal, batches, steps)
        else:
            found = from_files(session, profile_file, plan_file, result_file, goal)
        found = replace(found, command=shlex.join(["memfit", *sys.argv[1:]]))
        if isinstance(found, EndedReport):
            _show_ended(session, found, outputs)
        if strategies:
            found = with_curve(session, found, goal, strategies, points)
        _show(session, found, outputs, _write(session, found, outputs))


def _refuse_data_file(target: str) -> None:
    """A file that is no program is no TARGET: whoever gives one means what is in it."""
    from memfit.targets import target_names

    path = Path(target)
    if target not in target_names() and path.suffix != ".py" and path.is_file():
        raise UsageError(
            f"TARGET {target!r} is a file that is neither Python nor called .json",
            hint=f"if memfit fit -o wrote it: --result {shlex.quote(target)}; a profile is given "
            "by --profile, a plan for it by --plan",
        )


def _check(outputs: Outputs, what: Target, goal: GoalOptions, files: list[str]) -> None:
    """Refuse what cannot work before the slow part begins."""
    if outputs == Outputs(None, None, None, None):
        raise UsageError(
            "there is nothing to write",
            hint="give -o report.html, --trace, --flame or --plots",
        )
    if not what.name and not files:
        raise UsageError(
            "there is nothing to report on",
            hint="give a TARGET and --budget B, or what a fit wrote: memfit report run.json",
        )
    if what.name and files:
        refuse_together(["TARGET", *files])
    if not what.name and what != Target("", None, None, None, None, None, []):
        raise UsageError(
            "--batch, --seq, --dtype, --optimizer, --device and --set say what to fit, and there "
            "is no TARGET",
            hint="leave them out: a profile is of one workload",
        )
    goal.check()
    for path in (outputs.page, outputs.trace, outputs.flame):
        check_file(path)
    if outputs.plots is not None:
        from memfit.report.export.plots import check_matplotlib

        check_matplotlib()
        make_folder(outputs.plots)


def _write(session: Session, found: RunReport, outputs: Outputs) -> list[Path]:
    written = []
    session.progress("writing the report")
    if outputs.page is not None:
        from memfit.report.html.page import html_page

        write_text(outputs.page, html_page(found))
        written.append(outputs.page)
    if outputs.trace is not None:
        from memfit.report.export.trace import trace_json

        write_json(outputs.trace, trace_json(found), indent=None)
        written.append(outputs.trace)
    if outputs.flame is not None:
        from memfit.report.export.flame import speedscope_json

        write_json(outputs.flame, speedscope_json(found), indent=None)
        written.append(outputs.flame)
    if outputs.plots is not None:
        from memfit.report.export.plots import write_plots

        written += write_plots(found, outputs.plots)
    return written


def _show(session: Session, found: RunReport, outputs: Outputs, written: list[Path]) -> None:
    from memfit.report.fit import summary_line
    from memfit.report.plan import summary_line as plan_line

    result = found.result
    if session.as_json:
        session.emit(
            {
                "written": [str(path) for path in written],
                "workload": found.profile.workload,
                "budget_bytes": found.plan.budget_bytes,
                "before": {
                    "peak_bytes": found.before.peak_bytes,
                    "categories": found.before.peak_categories,
                    "measured_peak_bytes": found.measured_before_bytes,
                },
                "after": {
                    "peak_bytes": found.after.peak_bytes,
                    "categories": found.after.peak_categories,
                    "measured_peak_bytes": found.measured_after_bytes,
                },
                "verdict": None if result is None else result.verdict,
                "refused": None if found.refused is None else found.refused.error,
            }
        )
    else:
        session.line(f"wrote {', '.join(str(path) for path in written)}")
        if found.refused is not None:
            session.line(f"{found.refused.heading}: {found.refused.error}")
        following = outputs.next_words()
        session.line(
            plan_line(found.plan, following) if result is None else summary_line(result, following)
        )
    if found.refused is not None:
        raise typer.Exit(found.refused.exit_code)
    if result is not None and not result.numerics.kept:
        raise typer.Exit(1)


def _show_ended(session: Session, found: EndedReport, outputs: Outputs) -> NoReturn:
    """Write the page of a fit that ended without a profile: there is nothing else to draw."""
    from memfit.report.html.ended import ended_page

    refused = found.refused
    if outputs.page is None:
        raise DeviceMemoryError(
            f"{refused.error}. There is no profile to draw from",
            hint="-o report.html shows how far it came and what was live",
        )
    write_text(outputs.page, ended_page(found))
    if session.as_json:
        session.emit({"written": [str(outputs.page)], **refused.to_json()})
    else:
        session.line(f"wrote {outputs.page}")
        if outputs != (alone := Outputs(outputs.page, None, None, None)):
            session.line("and nothing else: there is no profile to draw from")
        session.line(f"{refused.heading}: {refused.error}")
        session.line(alone.next_words())
    raise typer.Exit(refused.exit_code)
