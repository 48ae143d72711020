"""`memfit init`: a workload file to start from."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from memfit.cli import options
from memfit.cli.session import opened


def init(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="The file to write; left out: workload.py, or memfit.toml with --preset.",
            show_default=False,
        ),
    ] = None,
    preset: options.Preset = None,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Write a small workload file to change into your own training step; or, with --preset, a
    configuration file with that preset's fields, for --config."""
    with opened(as_json=as_json, verbose=verbose) as session:
        if preset is None:
            from memfit.targets.starter import write_starter

            file = file or Path("workload.py")
            write_starter(file)
            facts = {"target": f"{file}:workload"}
            what = "put your model, loss, optimizer and batch into it"
            command = f"memfit fit {shlex.quote(facts['target'])}"
        else:
            from memfit.config import named

            file = file or Path("memfit.toml")
            named(preset).save(file, new=True)
            facts = {"preset": preset}
            what = f"the fields of {preset}, to be changed"
            command = f"memfit fit TARGET --config {shlex.quote(str(file))}"
        if session.as_json:
            session.emit({"file": str(file), **facts, "next": command})
        else:
            session.line(f"wrote {file}: {what}")
            session.line(f"next: {command}")
