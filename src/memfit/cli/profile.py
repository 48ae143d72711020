"""`memfit profile`: one step, measured: memory and seconds by segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli import options
from memfit.cli.goal import check_executor, setup_words
from memfit.cli.output_file import make_folder, write_json, writing
from memfit.cli.session import SCHEMA_VERSION, opened
from memfit.cli.target import Target, accumulating
from memfit.errors import UsageError

if TYPE_CHECKING:
    from memfit.ir.component_times import ComponentTimes
    from memfit.ir.profile import Profile
    from memfit.ir.timeline import Timeline
    from memfit.report.profile import Row
    from memfit.workload import Workload

_STEPS = 10  # that components are timed in
_NO_COMPONENTS = "components are not timed: the plain step does not fit on the device"


def profile(
    target: options.TargetName,
    segments: options.Segments = None,
    executor: options.Executor = None,
    accumulate: options.Accumulate = 1,
    every: Annotated[bool, typer.Option("--all", help="List every segment by itself.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Write profile.json, segments.csv, timeline.csv, nodes and activations (CSV and "
            "JSON) there.",
        ),
    ] = None,
    plots: Annotated[
        bool,
        typer.Option(
            "--plots",
            help="Also draw there, PNG and SVG: run time, peak memory, activation size, inactive "
            "time and memory against rank.",
        ),
    ] = False,
    components: Annotated[
        bool,
        typer.Option(
            "--components",
            help="Also time the components of the plain step: forward and backward by segment, "
            "recomputing of the model's own, the optimizer.",
        ),
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option("--steps", metavar="N", min=1, help="Steps to time them in (default 10)."),
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
    """Measure one training step of TARGET: memory by category, memory and time by segment."""
    with opened(as_json=as_json, verbose=verbose) as session:
        what = Target(target, batch, seq, dtype, optimizer, device, fields or [])
        check_executor(executor)
        _check_components(components, steps, accumulate)
        if plots:
            _check_plots(output)
        make_folder(output)
        session.progress("loading torch")
        from memfit import api
        from memfit.ir.codec import to_data
        from memfit.planning.call_peaks import call_peaks
        from memfit.planning.simulate import Simulator
        from memfit.planning.strategies import saved_bytes
        from memfit.report.component_times import component_report
        from memfit.report.csv import write_csv
        from memfit.report.profile import profile_report, segment_rows, timeline_rows

        session.progress(f"building {target}")
        workload = what.build()
        measured = api.profile(
            workload,
            segments=segments,
            executor=executor,
            accumulate=accumulate,
            progress=session.progress,
        )
        times = None
        if components and measured.baseline is None:
            measured = replace(measured, notes=(*measured.notes, _NO_COMPONENTS))
        elif components:
            session.progress("timing the components of the step")
            times = _component_times(workload, steps, segments)
        simulator = Simulator(measured)
        timeline = simulator.timeline([])
        saved = [saved_bytes(simulator, call.index) for call in measured.graph.calls]
        rows = segment_rows(measured, saved, call_peaks(measured.graph, timeline))
        if output is not None:
            write_json(output / "profile.json", to_data(measured))
            with writing(output):
                write_csv(output / "segments.csv", rows)
                write_csv(output / "timeline.csv", timeline_rows(timeline))
                drawn = _write_tables(measured, output, plots=plots)
        if session.as_json:
            session.emit(_as_data(measured, timeline, rows, times))
            return
        session.show(*profile_report(measured, rows, timeline, every=every))
        if times is not None:
            session.line(f"\n{component_report(times).rstrip()}\n")
        if output is not None:
            names = ", ".join(dict.fromkeys(path.stem for path in drawn))
            session.line(
                "wrote profile.json, segments.csv, timeline.csv, nodes and activations (.csv and "
                f".json) {f'and {names} (.png and .svg) ' if drawn else ''}to {output}"
            )
        same = [*setup_words(segments or [], executor), *accumulating(accumulate)]
        session.line(f"next: {what.command('plan', '--sweep', *same)}")


def _check_components(asked: bool, steps: int | None, accumulate: int) -> None:
    """Refuse what would be left undone, or be of another step than the rest."""
    if steps is not None and not asked:
        raise UsageError(
            "--steps are those that components are timed in, and none are asked for",
            hint="add --components",
        )
    if asked and accumulate > 1:
        raise UsageError(
            f"components are timed of one batch and a step of the optimizer, not of {accumulate}",
            hint="leave --accumulate out: the seconds of a batch's forward and backward are those",
        )


def _component_times(
    workload: Workload, steps: int | None, segments: list[str] | None
) -> ComponentTimes:
    """Where the seconds of the plain step go; its batch is there already, so there is no loader."""
    from memfit.observe.components import component_times

    return component_times(workload, steps=steps or _STEPS, segments=segments or None)


def _as_data(
    measured: Profile,
    timeline: Timeline,
    rows: Sequence[Row],
    times: ComponentTimes | None,
) -> dict[str, Any]:
    """What --json prints; without --components these are null."""
    from memfit.ir.codec import to_data

    return {
        "workload": measured.workload,
        "device": to_data(measured.device),
        "executor": measured.executor,
        "static": measured.graph.static,
        "gradient_bytes": measured.graph.gradient_bytes,
        "step_s": measured.step_s,
        "baseline": to_data(measured.baseline),
        "copy": to_data(measured.copy),
        "simulated_peak": {
            "peak_bytes": timeline.peak_bytes,
            "categories": timeline.peak_categories,
            "where": timeline.peak.where,
        },
        "segments": rows,
        "components": None if times is None else times.to_json(),
        "notes": list(measured.notes),
    }


def _check_plots(output: Path | None) -> None:
    """Refuse plots that could not be drawn before the slow part begins."""
    from memfit.report.export.plots import check_matplotlib

    if output is None:
        raise UsageError(
            "--plots draws files, and there is no folder to write them to", hint="add -o DIR"
        )
    check_matplotlib()


def _write_tables(profile: Profile, folder: Path, *, plots: bool) -> list[Path]:
    """Write the operators and the activations of the step, as CSV and JSON; return what is drawn
    of them."""
    from memfit.planning.segment.tables import (
        ACTIVATION_COLUMNS,
        NODE_COLUMNS,
        activation_rows,
        node_rows,
    )
    from memfit.report.csv import write_csv

    nodes, activations = node_rows(profile), activation_rows(profile)
    for name, rows, columns in (
        ("nodes", nodes, NODE_COLUMNS),
        ("activations", activations, ACTIVATION_COLUMNS),
    ):
        write_csv(folder / f"{name}.csv", rows, columns)
        write_json(folder / f"{name}.json", {"schema_version": SCHEMA_VERSION, name: rows})
    if not plots:
        return []
    from memfit.report.export.profile_plots import write_profile_plots

    return write_profile_plots(nodes, activations, folder)
