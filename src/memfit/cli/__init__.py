"""The command line: one file per command, and what they share."""

from __future__ import annotations


def main() -> None:
    """Run the command line of `memfit`."""
    from memfit.cli.app import app

    app(prog_name="memfit")
