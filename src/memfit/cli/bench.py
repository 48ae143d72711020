"""`memfit bench`: workloads under memfit and its peers, each cell in a process of its own."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.bench.report.files import CHARTS, write_forms, write_markdown
from memfit.cli import options
from memfit.cli.bench_options import BenchOptions
from memfit.cli.bench_progress import showing_progress
from memfit.cli.output_file import check_file
from memfit.cli.session import Session, opened
from memfit.cli.target import Target
from memfit.errors import UsageError

if TYPE_CHECKING:
    from memfit.bench.against import Change
    from memfit.bench.cell import CellSpec
    from memfit.ir.bench import BenchReport, Cell

FORMS = (".md", ".html", ".log", CHARTS)
_WHAT, _RUN = "What to run", "How to run it"


def bench(
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="TARGET", help="Targets; left out: those of --suite."),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite",
            metavar="NAME",
            help="peers (default): five workloads beside every peer; sweep: ResNet-152 and the "
            "encoder over batch sizes; savings: estimated and measured cuts of 40 %.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    workloads: Annotated[
        list[str] | None,
        typer.Option(
            "--workloads",
            metavar="NAME",
            help="Of the suite, only those named like this, such as 'encoder*'; may be repeated.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    systems: Annotated[
        list[str] | None,
        typer.Option(
            "--systems",
            metavar="LIST",
            help="Systems by name, with commas between them (--list shows all); memfit stands for "
            "memfit at --budgets.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    budgets: Annotated[
        list[str] | None,
        typer.Option(
            "--budgets",
            metavar="LIST",
            help="Budgets for memfit: 60%,40% of the unplanned step's peak, or 16GiB.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            "--batch-sizes",
            metavar="LIST",
            help="Every target at these batch sizes: 4,8,16; without a TARGET those of the sweep. "
            "memfit runs by the module executor then, unless --executor names another.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    largest_in: Annotated[
        str | None,
        typer.Option(
            "--largest-in",
            metavar="B",
            help="Also find the largest batch in this budget, plain and with a plan.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="PATTERN",
            help="Only cells like 'WORKLOAD | SYSTEM', such as 'encoder* | memfit*'; may be "
            "repeated.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    allow: options.Allow = None,
    executor: options.Executor = None,
    steps: Annotated[
        int,
        typer.Option(
            "--steps",
            metavar="N",
            min=1,
            help="Steps of each kind to time, of short ones up to five times as many.",
            rich_help_panel=_RUN,
        ),
    ] = 10,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="S",
            min=1,
            help="Seconds that a cell may take.",
            rich_help_panel=_RUN,
        ),
    ] = 600.0,
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit",
            metavar="S",
            min=1,
            help="Seconds for all cells together, from the start of this command. No cell is begun "
            "that is not expected to end in time; those left are listed, for the same command to "
            "go on with.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    compile_ahead: Annotated[
        int | None,
        typer.Option(
            "--compile-ahead",
            metavar="N",
            min=1,
            help="Before any cell is timed, compile for those of torch.compile, N at once, on a "
            "device that is busy with the others; first steps then find the code on disk. It "
            "takes half of --time-limit at most.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    at_once: Annotated[
        int,
        typer.Option(
            "--at-once",
            metavar="N",
            min=1,
            help="Cells side by side: whenever one is being timed the others are stopped, so times "
            "are those of a quiet machine. The device must have room for all; what runs out of "
            "memory is run again by itself. Each may take N times --timeout.",
            rich_help_panel=_RUN,
        ),
    ] = 1,
    cap: Annotated[
        str | None,
        typer.Option(
            "--cap",
            metavar="B",
            help="Let no cell take more than this from the GPU, as on a smaller card.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    retry: Annotated[
        bool,
        typer.Option(
            "--retry",
            help="Run cells again that died or had no room for their eager step.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="FILE",
            help="Compare with an earlier benchmark; exit code 1 if anything got worse, or one of "
            "its cells that were asked for has not run or has another reference.",
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance", metavar="SHARE", min=0, help="Changes of time that do not count."
        ),
    ] = 0.05,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="JSON; Markdown and HTML go beside it."
        ),
    ] = Path("bench.json"),
    no_charts: Annotated[
        bool, typer.Option("--no-charts", help="Draw nothing (matplotlib is not needed then).")
    ] = False,
    listed: Annotated[
        bool, typer.Option("--list", help="Show the systems and the cells, and run nothing.")
    ] = False,
    render: Annotated[
        Path | None,
        typer.Option(
            "--render",
            metavar="FILE",
            help="Write the Markdown, HTML and charts of an earlier benchmark's JSON anew beside "
            "it, on any machine, and run nothing.",
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
    """Measure training steps under memfit and its peers: peak, time, overhead, numbers.

    Every cell is saved as it ends: the same command goes on where it was cut off.
    """
    begun = time.monotonic()
    with opened(as_json=as_json, verbose=verbose) as session:
        if render is not None:
            _render(session, render, charts=not no_charts)
            return
        what = Target("", batch, seq, dtype, optimizer, device, fields or [])
        asked = BenchOptions(
            what,
            targets or [],
            suite,
            workloads or [],
            systems or [],
            budgets or [],
            batch_sizes,
            largest_in,
            only or [],
            allow or [],
            executor,
            steps,
            timeout,
            cap,
            retry,
            compile_ahead,
            at_once,
        )
        _check_output(output)
        session.progress("loading torch")
        from memfit.bench.report.charts import check_charts

        cells = asked.cells()
        if listed:
            _show_list(session, cells)
            return
        before = None if against is None else _earlier(against, cells)
        if not no_charts:
            check_charts()
        end = None if time_limit is None else begun + time_limit
        with _resumable(session, output):
            report, left = _run(session, asked, cells, output, verbose, end)
        changes: list[Change] = []
        said: list[str] = []
        if before is not None:
            from memfit.bench.against import change_lines, compare, machine_lines

            names = [_key(c) for c in cells]
            changes = compare(before, report, names, tolerance)
            said = [*machine_lines(before, report), *change_lines(changes)]
        report.save(output)
        files = [output, *write_forms(report, output, said, charts=not no_charts)]
        _show(session, report, cells, changes, said, files, [_key(spec) for spec in left])
        differ = any(c.planned is not None and not c.planned.numbers_agree for c in report.cells)
        if differ or not all(change.passes for change in changes):
            raise typer.Exit(1)


def _render(session: Session, path: Path, *, charts: bool) -> None:
    """Write every form of a report that was made before, wherever that was."""
    from memfit.bench.report.charts import check_charts
    from memfit.ir.bench import BenchReport

    report = BenchReport.load(path)
    if charts:
        check_charts()
    _check_output(path)
    files = [str(file) for file in write_forms(report, path, [], charts=charts)]
    if session.as_json:
        session.emit({"files": files})
    else:
        session.line(f"written: {', '.join(files)}")


def _earlier(path: Path, cells: list[CellSpec]) -> BenchReport:
    """The benchmark to compare with; one that has none of the cells is refused."""
    from memfit.bench.against import shared_cells
    from memfit.ir.bench import BenchReport

    report = BenchReport.load(path)
    shared_cells(report, [_key(cell) for cell in cells])
    return report


@contextmanager
def _resumable(session: Session, output: Path) -> Iterator[None]:
    """Where the run is interrupted inside, say how to go on with it."""
    try:
        yield
    except KeyboardInterrupt:
        session.quiet()
        again = shlex.join(["memfit", *sys.argv[1:]])
        for line in (f"what has run is in {output}", f"to go on with the rest: {again}"):
            typer.echo(line, err=True)
        raise


def _check_output(output: Path) -> None:
    """Refuse a file that could not be written, or that would be written over by another form."""
    if output.suffix in FORMS:
        raise UsageError(
            f"-o {output} names the JSON file, beside which {output.suffix} is written",
            hint=f"try -o {output.with_suffix('.json')}",
        )
    check_file(output)
    for form in FORMS[:-1]:
        check_file(output.with_suffix(form))


def _run(
    session: Session,
    asked: BenchOptions,
    cells: list[CellSpec],
    output: Path,
    verbose: bool,
    end: float | None,
) -> tuple[BenchReport, list[CellSpec]]:
    """Run the cells that the file has not got, and save after each; also those left by `end`."""
    from memfit.bench.compile_ahead import compile_ahead
    from memfit.bench.machine import machine_facts
    from memfit.bench.process import cell_processes, shared_folder
    from memfit.bench.side_by_side import run_side_by_side
    from memfit.bench.suite import in_order, missing_cells, open_report, run_cells
    from memfit.measure.turns import turns_folder

    settings = asked.settings()
    report = open_report(output, machine_facts(asked.target.device), settings)
    command = _command(sys.argv[1:])
    if command not in report.commands:
        report = replace(report, commands=(*report.commands, command))
    missing = missing_cells(report, cells, settings)
    suite = replace(asked, only=()).cells()  # the order of all, whichever are run now
    report.save(output)  # a place that cannot be written is better known before the first cell

    session.quiet()
    with showing_progress(missing, len(cells)) as progress:

        def save(now: BenchReport, cell: Cell) -> None:
            now = in_order(now, suite)
            now.save(output)
            write_markdown(now, output)
            progress.ended(cell)

        log = output.with_suffix(".log") if verbose else None
        with shared_folder() as folder:
            if asked.compile_ahead:
                room_s = math.inf if end is None else end - time.monotonic()
                limit_s = min(settings.timeout_s, room_s / 2)
                compile_ahead(missing, folder, asked.compile_ahead, limit_s, progress.say, log)
            how: dict[str, Any] = {"started": progress.started, "log": log, "end": end}
            if asked.at_once == 1:
                with cell_processes(missing, folder, progress.say) as run:
                    report, left = run_cells(report, missing, settings, save, run=run, **how)
            else:
                how |= {"at_once": asked.at_once, "folder": turns_folder(folder / "turns")}
                lane = partial(cell_processes, missing, folder, progress.say, how["folder"])
                report, left = run_side_by_side(
                    report, missing, settings, save, open_lane=lane, **how
                )
    return in_order(report, suite), left


def _show(
    session: Session,
    report: BenchReport,
    cells: list[CellSpec],
    changes: list[Change],
    said: list[str],
    files: list[Path],
    left: list[str],
) -> None:
    from rich.text import Text

    from memfit.bench.order import UNKNOWN_CELL_S
    from memfit.bench.report.tables import conclusion, sections
    from memfit.bench.report.terminal import shown_table
    from memfit.bench.verdict import judge, verdict_lines
    from memfit.ir.codec import to_data

    names = dict.fromkeys(c.workload.name for c in cells)
    if session.as_json:
        verdicts = {n: verdict_lines(judge(n, report.cells_of(n))) for n in names}
        session.emit(
            {
                **report.to_json(),
                "verdicts": verdicts,
                "changes": [{**to_data(c), "verdict": c.verdict} for c in changes],
                "files": [str(path) for path in files],
                "left": left,
            }
        )
        return
    for section in sections(report):
        for number, table in enumerate(section.tables):
            title = f"{section.title}: {table.title}" if table.title else section.title
            if number and section.title in names:
                continue  # plans and parts of the peak are in the files
            shown, remarks = shown_table(table)
            session.line(Text(title, style="bold"))
            session.show(shown)
            for line in remarks:
                session.line(line)
        for line in section.lines:
            session.line(line)
    for line in [*conclusion(report), *said]:
        session.line(line)
    session.line(f"written: {', '.join(str(path) for path in files)}")
    if left:
        session.line(
            f"{len(left)} cells are left for want of time, and the same command goes on with them "
            f"(one of whose kind none has run is taken to need {UNKNOWN_CELL_S:.0f} s):"
        )
    for name in left:
        session.line(name)


def _show_list(session: Session, cells: list[CellSpec]) -> None:
    from memfit.bench.systems.catalogue import FAMILIES, missing_package
    from memfit.report.terminal import columns

    names = [_key(c) for c in cells]
    if session.as_json:
        session.emit({"cells": names, "systems": {n: f.about for n, f in FAMILIES.items()}})
        return
    table = columns("system", "what it is", "", text=["system"], wrap=["what it is", ""])
    for name, family in FAMILIES.items():
        missing = missing_package(name)
        table.add_row(name, family.about, f"{missing} is not installed" if missing else "")
    session.show(table)
    for name in names:
        session.line(name)


def _key(spec: CellSpec) -> str:
    return f"{spec.workload.name} | {spec.system}"


def _command(words: list[str]) -> str:
    """The command line, without the file it writes to: that is a place on one machine."""
    kept, rest = [], iter(words)
    for word in rest:
        if word in ("-o", "--output"):
            next(rest, None)
        elif not word.startswith(("--output=", "-o")):
            kept.append(word)
    return shlex.join(["memfit", *kept])
