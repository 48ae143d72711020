"""`memfit init`: a workload file to start from."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from memfit.cli import options
from memfit.cli.session import opened


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")] = Path(
        "workload.py"
    ),
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Write a small workload file to change into your own training step."""
    with opened(as_json=as_json, verbose=verbose) as session:
        from memfit.targets.starter import write_starter

        write_starter(file)
        target = f"{file}:workload"
        command = f"memfit fit {shlex.quote(target)}"
        if session.as_json:
            session.emit({"file": str(file), "target": target, "next": command})
        else:
            session.line(f"wrote {file}: put your model, loss, optimizer and batch into it")
            session.line(f"next: {command}")
