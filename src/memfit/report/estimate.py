"""An estimate as tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memfit.ir.estimate import UNUSED_SHARE, WAYS, CardEstimate, Estimate, SegmentEstimate
from memfit.report.terminal import category_table, columns, facts, headline, note_lines, span_name
from memfit.units import format_bytes, format_seconds

_ADVICE = {
    "plain": "as it is",
    "recompute": "likely with recompute",
    "loss in tiles": "perhaps: recompute, loss in tiles",
    "step in backward": "perhaps: recompute, step in backward",
    "loss in tiles, step in backward": "perhaps: recompute, loss in tiles, step in backward",
    "optimizer on host": "perhaps: recompute, optimizer on host",
    "optimizer on host, step in backward": (
        "perhaps: recompute, optimizer on host, step in backward"
    ),
    "all of these": "perhaps: recompute, loss in tiles, optimizer on host, step in backward",
    None: "no",
}


def estimate_report(estimate: Estimate) -> list[RenderableType]:
    """The whole report of an estimate."""
    peak = category_table(
        f"peak of the {estimate.step} step, in {estimate.where}", estimate.categories, "peak"
    )
    return [
        headline(estimate.workload, {"name": "estimated without a GPU"}),
        _segment_table(estimate.segments),
        peak,
        facts(_facts(estimate)),
        _card_table(estimate.cards),
        *note_lines(estimate.notes),
    ]


def _facts(estimate: Estimate) -> list[tuple[str, str | Text]]:
    needs = [
        f"{name}: {format_bytes(size)}"
        for name, size in zip(WAYS, estimate.needs.in_order(), strict=True)
    ]
    state = f"{estimate.state_bytes_per_parameter:.1f} bytes per parameter"
    return [
        ("static", f"{format_bytes(estimate.static_bytes)}, weights to optimizer state {state}"),
        ("needs", f"{'; '.join(needs)} (all but plain are bounds, not plans)"),
        ("room", f"headroom counts {UNUSED_SHARE:.0%} more, which the allocator leaves unused"),
        ("work", f"{estimate.flops / 1e12:.2f} TFLOP, {format_bytes(estimate.moved_bytes)} moved"),
    ]


def _card_table(cards: Sequence[CardEstimate]) -> Table:
    names = ("card", "usable", "plain step", "headroom", "step (guess)", "fits")
    table = columns(*names, text=["card"], wrap=["fits"])
    for card in cards:
        seconds = card.guessed_step_s
        table.add_row(
            card.name,
            format_bytes(card.usable_bytes),
            format_bytes(card.needs.plain_bytes),
            format_bytes(card.headroom_bytes),
            "-" if seconds is None else f"~{format_seconds(seconds)}",
            Text(_ADVICE[card.way], style="green" if card.fits else ""),
        )
    return table


def _segment_table(segments: Sequence[SegmentEstimate]) -> Table:
    table = columns("segment", "saved each", "parameters each", wrap=["segment"])
    for _, members in groupby(segments, key=lambda s: (s.saved_bytes, s.parameter_bytes)):
        group = list(members)
        name = span_name(group[0].name, group[-1].name)
        table.add_row(
            name + (f" ({len(group)})" if len(group) > 1 else ""),
            format_bytes(group[0].saved_bytes),
            format_bytes(group[0].parameter_bytes),
        )
    return table
