"""`memfit profile`: one step, measured: memory and seconds by segment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli import options
from memfit.cli.goal import check_executor, setup_words
from memfit.cli.output_file import make_folder, write_json, writing
from memfit.cli.session import SCHEMA_VERSION, opened
from memfit.cli.target import Target, accumulating

if TYPE_CHECKING:
    from memfit.ir.profile import Profile


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
        make_folder(output)
        session.progress("loading torch")
        from memfit import api
        from memfit.ir.codec import to_data
        from memfit.planning.simulate import Simulator
        from memfit.planning.strategies import saved_bytes
        from memfit.report.csv import write_csv
        from memfit.report.profile import profile_report, segment_rows, timeline_rows

        session.progress(f"building {target}")
        measured = api.profile(
            what.build(),
            segments=segments,
            executor=executor,
            accumulate=accumulate,
            progress=session.progress,
        )
        simulator = Simulator(measured)
        timeline = simulator.timeline([])
        saved = [saved_bytes(simulator, call.index) for call in measured.graph.calls]
        rows = segment_rows(measured, saved)
        if output is not None:
            write_json(output / "profile.json", to_data(measured))
            with writing(output):
                write_csv(output / "segments.csv", rows)
                write_csv(output / "timeline.csv", timeline_rows(timeline))
                _write_tables(measured, output)
        if session.as_json:
            session.emit(
                {
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
                    "notes": list(measured.notes),
                }
            )
            return
        session.show(*profile_report(measured, saved, timeline, every=every))
        if output is not None:
            session.line(
                "wrote profile.json, segments.csv, timeline.csv, nodes and activations (.csv and "
                f".json) to {output}"
            )
        same = [*setup_words(segments or [], executor), *accumulating(accumulate)]
        session.line(f"next: {what.command('plan', '--sweep', *same)}")


def _write_tables(profile: Profile, folder: Path) -> None:
    """Write the operators and the activations of the step, each as CSV and as JSON."""
    from memfit.planning.segment.tables import (
        ACTIVATION_COLUMNS,
        NODE_COLUMNS,
        activation_rows,
        node_rows,
    )
    from memfit.report.csv import write_csv

    for name, rows, columns in (
        ("nodes", node_rows(profile), NODE_COLUMNS),
        ("activations", activation_rows(profile), ACTIVATION_COLUMNS),
    ):
        write_csv(folder / f"{name}.csv", rows, columns)
        write_json(folder / f"{name}.json", {"schema_version": SCHEMA_VERSION, name: rows})
