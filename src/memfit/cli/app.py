"""The typer application: which commands there are."""

from __future__ import annotations

from typing import Annotated

import typer

from memfit.cli import (
    batch_size,
    bench,
    doctor,
    estimate,
    fit,
    init,
    plan,
    profile,
    report,
    resources,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # an unexpected exception is a bug: its plain traceback helps
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("fit")(fit.fit)
app.command("plan")(plan.plan)
app.command("profile")(profile.profile)
app.command("batch-size")(batch_size.batch_size)
app.command("bench")(bench.bench)
app.command("estimate")(estimate.estimate)
app.command("report")(report.report)
app.command("resources")(resources.resources)
app.command("doctor")(doctor.doctor)
app.command("init")(init.init)


def _print_version(asked: bool) -> None:
    if asked:
        from memfit import __version__

        typer.echo(f"memfit {__version__}")
        raise typer.Exit()


@app.callback()
def memfit(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Fit a PyTorch training step into a memory budget given in bytes, and prove that it fits.

    Start with `memfit init` (writes a workload file) or `memfit fit encoder`.
    """
