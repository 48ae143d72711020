"""`memfit estimate`: what a step would need on a GPU, without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from memfit.cli import options
from memfit.cli.goal import refuse_together
from memfit.cli.session import opened
from memfit.cli.target import Target


def estimate(
    target: options.TargetName,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", metavar="NAME", help='A card, such as "RTX 4090"; left out: every card known.'
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="B", help="Bytes instead of a card: 16GiB or 16GB."),
    ] = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    fields: options.Fields = None,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Say whether a training step of TARGET fits on a GPU: no GPU, no memory, seconds.

    Exit code 0: the plain step fits (on any card, if none is named); 1: it does not.
    """
    with opened(as_json=as_json, verbose=verbose) as session:
        what = Target(target, batch, seq, dtype, optimizer, None, fields or [])
        device = _device(gpu, budget)
        session.progress("loading torch")
        from memfit.estimating.estimate import estimate as estimate_step
        from memfit.report.estimate import estimate_report
        from memfit.report.terminal import budget_word
        from memfit.targets import is_file_target

        session.progress(f"tracing {target}")
        named = not is_file_target(target)
        built = replace(what, device="cpu") if named else what
        made = estimate_step(built.build, device, of_target=named)
        if session.as_json:
            session.emit(made.to_json())
        else:
            session.show(*estimate_report(made))
            size = "auto" if device is None else budget_word(made.cards[0].usable_bytes)
            allowed = [] if device is None else _allowing(made.cards[0].way)
            planned = what.command("plan", "--budget", size, *allowed)
            other = "take a smaller model or a larger card; every card known: "
            asked = what.command("estimate")
            session.line(f"{other}{asked}" if made.hopeless else f"next, on the card: {planned}")
        raise typer.Exit(0 if made.fits else 1)


def _allowing(way: str | None) -> list[str]:
    """The words that let a plan go this way; where none seems to fit, all of them and moving."""
    from memfit.ir.estimate import TECHNIQUES

    names = ("offload", *TECHNIQUES["all of these"]) if way is None else TECHNIQUES.get(way, ())
    return [word for name in names for word in ("--allow", f"+{name}")]


def _device(gpu: str | None, budget: str | None) -> str | int | None:
    """The card's name or the bytes, checked before torch is loaded."""
    from memfit.ir.cards import find_card
    from memfit.planning.budget import budget_bytes

    given = {"--gpu": gpu, "--budget": budget}
    refuse_together([option for option, value in given.items() if value is not None])
    if gpu is not None:
        return find_card(gpu).name
    return None if budget is None else budget_bytes(budget)
