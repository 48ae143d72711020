"""Where the seconds of a step go, as text."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from memfit.ir.component_times import ComponentTimes, CopyTime
from memfit.report.memory_series import as_text
from memfit.report.terminal import columns, facts, share
from memfit.units import format_bytes, format_seconds

_MOST_SEGMENTS = 40


def component_report(times: ComponentTimes) -> str:
    """The whole report as plain text: the components add up to the step, segments to them.

    Without segments where none were told apart.
    """
    rows: list[tuple[str, str | Text]] = [
        (
            "step",
            f"{format_seconds(times.step_s)} by the host's clock, middle half of {times.steps} "
            f"steps, spread {format_seconds(times.step_spread_s)}; components account for "
            f"{times.accounted_share:.1%}",
        ),
        ("recompute", times.recompute),
    ]
    if "loader" not in times.components:
        rows.append(("loader", "not measured: no loader was given"))
    if times.copies is not None:
        rows.append(("copies", _copies(times.copies)))
    rows += [("note", note) for note in times.notes]
    heading = Text.assemble((times.workload["name"], "bold"), f"  {times.device}")
    segments = [_segments(times)] if times.segments else []
    return as_text([heading, _components(times), facts(rows), *segments])


def _components(times: ComponentTimes) -> Table:
    table = columns("component", "time", "share", text=["component"])
    total = sum(times.components.values())
    for name, seconds in times.components.items():
        table.add_row(name, format_seconds(seconds), share(seconds, total))
    table.add_section()
    table.add_row("sum", format_seconds(total), "", style="bold")
    return table


def _segments(times: ComponentTimes) -> Table:
    table = columns("segment", "forward", "backward", "recompute", "share", text=["segment"])
    total = sum(segment.total_s for segment in times.segments)
    named = [s for s in times.segments if s.name]
    largest = sorted(named, key=lambda s: -s.total_s)[:_MOST_SEGMENTS]
    for segment in times.segments:
        if segment in largest or not segment.name:
            seconds = (segment.forward_s, segment.backward_s, segment.recompute_s)
            table.add_row(
                segment.name or "outside of segments",
                *(format_seconds(s) for s in seconds),
                share(segment.total_s, total),
            )
    if len(named) > len(largest):
        table.caption = f"the {len(largest)} longest of {len(named)} segments"
    return table


def _copies(copies: CopyTime) -> str:
    return (
        f"{format_bytes(copies.out_bytes)} to the host in {format_seconds(copies.out_s)}, "
        f"{format_bytes(copies.back_bytes)} back in {format_seconds(copies.back_s)} a step, beside "
        f"the computation; it waited {format_seconds(copies.waited_s)} for them"
    )
