"""A plan as tables: what happens to each segment, where the peak is, what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memfit.ir.plan import RECOMPUTE, Plan, SegmentPlan
from memfit.report.terminal import (
    category_table,
    columns,
    facts,
    headline,
    note_lines,
    ratio,
    span_name,
)
from memfit.units import format_bytes, format_seconds

MOST_ROWS = 30


@dataclass(frozen=True)
class Group:
    """Consecutive segments that are alike and meet the same decision."""

    members: tuple[SegmentPlan, ...]

    @property
    def name(self) -> str:
        """The first and the last name, and how many there are."""
        first, count = self.members[0], len(self.members)
        return span_name(first.name, self.members[-1].name) + (f" ({count})" if count > 1 else "")

    @property
    def decision(self) -> str:
        """What happens to each member, and why or in which runs."""
        first = self.members[0]
        runs = sorted({m.run for m in self.members if m.run is not None})
        if not runs:
            return f"{first.decision}: {first.reason.removeprefix('kept: ')}"
        numbers = f"run {runs[0]}" if len(runs) == 1 else f"runs {runs[0]} to {runs[-1]}"
        return f"{first.decision}, {numbers}"


def plan_report(plan: Plan, device_name: str, *, every: bool) -> list[RenderableType]:
    """The whole report of a plan but for its last line."""
    predicted = plan.predicted
    return [
        headline(plan.workload, {"name": device_name}),
        segment_table(plan.segments, every=every),
        category_table(
            f"predicted peak, in {predicted.where}", predicted.categories, "predicted peak"
        ),
        facts(_facts(plan)),
        *note_lines(plan.notes),
    ]


def segment_table(segments: Sequence[SegmentPlan], *, every: bool) -> Table:
    """One row per segment, or per group of like ones unless `every`."""
    groups = [Group((s,)) for s in segments] if every else group_segments(segments)
    names = ("segment", "class", "saved each", "recompute", "decision")
    table = columns(*names, wrap=("segment", "class", "decision"))
    table.columns[1].overflow = "ellipsis"
    left_out = 0 if every else max(0, len(groups) - MOST_ROWS)
    cut = MOST_ROWS * 2 // 3
    for number, group in enumerate(groups):
        if left_out and number == cut:
            table.add_row(f"... {left_out} more rows (--all)", *[""] * 4, style="dim")
        if not cut <= number < cut + left_out:
            _add_group(table, group)
    return table


def group_segments(segments: Sequence[SegmentPlan]) -> list[Group]:
    """Join neighbours of the same class, size, time and decision."""
    return [
        Group(tuple(members))
        for _, members in groupby(
            segments, key=lambda s: (s.kind, s.saved_bytes, s.recompute_s, s.decision, s.reason)
        )
    ]


def summary_line(plan: Plan, next_command: str) -> Text:
    """Budget, predicted peak and time, and what to do next, in one line."""
    budget = "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    return Text(
        f"budget {budget}; predicted peak {format_bytes(plan.predicted.peak_bytes)}; "
        f"predicted time {slowdown(plan)} baseline; next: {next_command}"
    )


def slowdown(plan: Plan) -> str:
    """Predicted time over that of the unplanned step."""
    return ratio(plan.predicted.step_s / plan.baseline_step_s)


def recomputed(plan: Plan) -> str:
    """How many segments are recomputed, of all."""
    return f"{sum(s.decision == RECOMPUTE for s in plan.segments)} of {len(plan.segments)}"


def _add_group(table: Table, group: Group) -> None:
    first = group.members[0]
    table.add_row(
        group.name,
        first.kind,
        format_bytes(first.saved_bytes),
        format_seconds(first.recompute_s),
        group.decision,
        style="cyan" if first.decision == RECOMPUTE else "",
    )


def _facts(plan: Plan) -> list[tuple[str, str | Text]]:
    predicted = plan.predicted
    budget = "none given" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    rows: list[tuple[str, str | Text]] = [
        ("budget", budget),
        ("minimum", f"{format_bytes(plan.minimum_feasible_bytes)} is the smallest possible budget"),
        (
            "baseline",
            f"{format_bytes(plan.baseline_peak_bytes)} and "
            f"{format_seconds(plan.baseline_step_s)} with everything kept",
        ),
        ("static", f"{format_bytes(plan.static_bytes)} whatever the plan"),
        (
            "decisions",
            f"{recomputed(plan)} segments recomputed: "
            f"{format_bytes(plan.bytes_of(RECOMPUTE))} recomputed, "
            f"{format_bytes(plan.bytes_of('keep'))} kept",
        ),
        (
            "time",
            f"{format_seconds(predicted.step_s)} predicted, {slowdown(plan)} baseline; "
            f"no plan is faster than {format_seconds(predicted.lower_bound_s)} "
            f"(gap {predicted.gap:.2%})",
        ),
        ("plan", f"{plan.strategy}, made in {format_seconds(plan.plan_s)}"),
    ]
    if predicted.reserved_bytes != predicted.peak_bytes:
        reserved = f"{format_bytes(predicted.reserved_bytes)} predicted in the allocator's hands"
        rows.insert(1, ("reserved", reserved))
    return rows
