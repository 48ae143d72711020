"""A profile as tables and as CSV rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memfit.ir.profile import Profile
from memfit.ir.step_graph import CATEGORIES
from memfit.ir.timeline import Timeline
from memfit.report.copies import rates_line
from memfit.report.terminal import category_table, columns, facts, headline, note_lines, span_name
from memfit.units import format_bytes, format_seconds

Row = dict[str, object]


def profile_report(
    profile: Profile, rows: Sequence[Row], timeline: Timeline, *, every: bool
) -> list[RenderableType]:
    """The whole report of a profile; `rows` are those of `segment_rows`."""
    static = {**profile.graph.static, "gradients": profile.graph.gradient_bytes}
    return [
        headline(profile.workload, {"name": profile.device.name}),
        _segment_table(profile, rows, every=every),
        category_table("static: there whatever the plan", static, "static"),
        category_table(
            f"peak of the step, in {timeline.peak.where}", timeline.peak_categories, "peak"
        ),
        facts(_facts(profile, timeline)),
        *note_lines(profile.notes),
    ]


def segment_rows(
    profile: Profile, saved: Sequence[int], peaks: Sequence[tuple[int | None, int | None]]
) -> list[Row]:
    """One row per segment call: what it keeps for its backward, and the step's most bytes while
    its forward and its backward run; None where it has no such pass."""
    calls = zip(profile.graph.calls, profile.call_times, saved, peaks, strict=True)
    return [
        {
            "index": call.index,
            "name": call.name,
            "class": call.kind,
            "saved_bytes": size,
            "forward_peak_bytes": forward_peak,
            "backward_peak_bytes": backward_peak,
            "forward_s": times.forward_s,
            "backward_s": times.backward_s,
            "recompute_s": times.recompute_s,
            "captured": call.graph >= 0,
            "why_not_captured": profile.uncaptured.get(call.name, ""),
            "can_be_recomputed": call.pinned is None,
            "why_not": call.pinned or "",
        }
        for call, times, size, (forward_peak, backward_peak) in calls
    ]


def timeline_rows(timeline: Timeline) -> Iterator[Row]:
    """One row per moment of the step: bytes in all and by category."""
    for point in timeline.points:
        sizes = {f"{name}_bytes": point.bytes.get(name, 0) for name in CATEGORIES}
        yield {
            "position": point.position,
            "where": point.where,
            "total_bytes": point.total,
            **sizes,
        }


def _segment_table(profile: Profile, rows: Sequence[Row], *, every: bool) -> Table:
    names = ("segment", "class", "saved each", "peak", "forward", "backward", "recompute")
    table = columns(*names, wrap=("segment", "class"))
    table.columns[1].overflow = "ellipsis"
    # The clock differs by a little from call to call: bytes and class say what is alike.
    alike = groupby(
        rows, key=lambda r: r["index"] if every else (r["class"], r["saved_bytes"], r["why_not"])
    )
    for _, members in alike:
        group = list(members)
        first, last, count = group[0], group[-1], len(group)
        name = span_name(str(first["name"]), str(last["name"]))
        table.add_row(
            name + (f" ({count})" if count > 1 else ""),
            str(first["class"]),
            format_bytes(_mean(group, "saved_bytes")),
            format_bytes(_peak(group)),
            *(
                format_seconds(_mean(group, f"{what}_s"))
                for what in ("forward", "backward", "recompute")
            ),
        )
    table.add_section()
    seconds = [
        format_seconds(sum(getattr(t, f"{what}_s") for t in profile.call_times))
        for what in ("forward", "backward", "recompute")
    ]
    saved = format_bytes(sum(int(str(row["saved_bytes"])) for row in rows))
    peak = format_bytes(_peak(rows))
    table.add_row(f"all {len(rows)} together", "", saved, peak, *seconds, style="bold")
    return table


def _peak(rows: Sequence[Row]) -> int:
    """The most bytes of the step while any of these segments runs."""
    sizes = [row[f"{what}_peak_bytes"] for row in rows for what in ("forward", "backward")]
    return max((int(str(size)) for size in sizes if size is not None), default=0)


def _mean(rows: Sequence[Row], name: str) -> float:
    return sum(float(str(row[name])) for row in rows) / len(rows)


def _facts(profile: Profile, timeline: Timeline) -> list[tuple[str, str | Text]]:
    baseline = profile.baseline
    simulated = format_bytes(timeline.peak_bytes)
    device = profile.device
    rows: list[tuple[str, str | Text]] = [
        ("step time", format_seconds(profile.step_s)),
        (
            "peak",
            f"{simulated} simulated; the step does not fit on the device"
            if baseline is None
            else f"{format_bytes(baseline.peak_bytes)} measured, {simulated} simulated",
        ),
        (
            "device",
            f"{device.name}: {format_bytes(device.capacity_bytes)}, "
            f"{format_bytes(device.free_bytes)} free",
        ),
        ("copies", rates_line(profile.copy)),
    ]
    if baseline is not None and device.type == "cuda":
        rows.insert(2, ("reserved", f"{format_bytes(baseline.peak_reserved_bytes)} measured"))
    return rows
