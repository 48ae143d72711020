"""A plan as tables: what happens to each segment, where the peak is, what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memfit.ir.plan import KEEP, OFFLOAD, PARTIAL, RECOMPUTE, Plan, SegmentPlan, VariantPlan
from memfit.ir.profile import CopyRates
from memfit.report.copies import planned_line, why_nothing_moves
from memfit.report.decisions import tensor_counts
from memfit.report.techniques import technique_tables
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
SINGLE_LAYER = "a single layer"  # how the reason begins for segments nobody expects to be captured


@dataclass(frozen=True)
class Group:
    """Consecutive segments that are alike and meet the same decision."""

    members: tuple[SegmentPlan, ...]
    variant: VariantPlan | None = None  # the one they run by, if they were captured
    ahead: tuple[int, int] | None = None  # what is away comes back so many segments early

    @property
    def name(self) -> str:
        """The first and the last name, and how many there are."""
        first, count = self.members[0], len(self.members)
        return span_name(first.name, self.members[-1].name) + (f" ({count})" if count > 1 else "")

    @property
    def decision(self) -> str:
        """What happens to each member, and why or in which runs."""
        first = self.members[0]
        if first.decision == PARTIAL and self.variant is not None:
            tensors = self.variant.activations
            again = sum(t.decision == RECOMPUTE for t in tensors)
            inside = (
                f"partial: {again} of {len(tensors)} tensors recomputed, "
                f"frees {format_bytes(first.recomputed_bytes)}"
            )
            return f"{inside}; {self._sent}" if first.offloaded_bytes else inside
        if first.offloaded_bytes and len(self.members) > 1:
            return f"{first.decision}: {self._sent}"
        runs = sorted({m.run for m in self.members if m.run is not None})
        if not runs:
            return f"{first.decision}: {first.reason.removeprefix('kept: ')}"
        numbers = f"run {runs[0]}" if len(runs) == 1 else f"runs {runs[0]} to {runs[-1]}"
        return f"{first.decision}, {numbers}"

    @property
    def _sent(self) -> str:
        """What each member sends to the host, and how early it is fetched."""
        size = format_bytes(self.members[0].offloaded_bytes)
        return f"sends {size} to the host, back {_early(self.ahead)}"


def _early(ahead: tuple[int, int] | None) -> str:
    least, most = ahead or (0, 0)
    if most == 0:
        return "when its backward begins"
    span = str(most) if least == most else f"{least} to {most}"
    return f"{span} segment{'' if span == '1' else 's'} ahead"


def plan_report(
    plan: Plan,
    device_name: str,
    rates: CopyRates | None = None,
    *,
    every: bool,
    explain: bool = False,
    left_out: Mapping[str, str] | None = None,
) -> list[RenderableType]:
    """The whole report of a plan but for its last line.

    `rates` are those of copies, if the plan was allowed to move memory to the host. `explain` says
    of each technique why it was taken or not; `left_out` why some were not tried.
    """
    predicted = plan.predicted
    return [
        headline(plan.workload, {"name": device_name}),
        segment_table(plan, every=every),
        *technique_tables(plan, explain=explain, left_out=left_out),
        category_table(
            f"predicted peak, in {predicted.where}", predicted.categories, "predicted peak"
        ),
        facts(_facts(plan, rates)),
        *note_lines([*plan.notes, *uncaptured_notes(plan)]),
    ]


def segment_table(plan: Plan, *, every: bool) -> Table:
    """One row per segment, or per group of like ones unless `every`."""
    groups = group_segments(plan, every=every)
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


def group_segments(plan: Plan, *, every: bool = False) -> list[Group]:
    """Neighbours of the same class, size, time, decision and variant, joined unless `every`."""
    alike = groupby(
        enumerate(plan.segments),
        key=lambda item: item[0] if every else _likeness(item[1]),
    )
    groups = []
    for _, found in alike:
        members = tuple(found)
        variant = members[0][1].variant
        early = [s.prefetch - i for i, s in members if s.prefetch is not None]
        groups.append(
            Group(
                tuple(segment for _, segment in members),
                None if variant is None else plan.variants[variant],
                (min(early), max(early)) if early else None,
            )
        )
    return groups


def _likeness(segment: SegmentPlan) -> tuple[object, ...]:
    """What two neighbours must share to stand in one row.

    The reason of what is offloaded names when it comes back: another segment for each.
    """
    return (
        segment.kind,
        segment.saved_bytes,
        segment.recompute_s,
        segment.decision,
        segment.offloaded_bytes or segment.reason,
        segment.variant,
    )


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
    """How many segments are recomputed, of all: "4 of 7", or "4 + 2 part of 7": two in part."""
    partial = decided(plan, PARTIAL)
    inside = f" + {partial} part" if partial else ""
    return f"{decided(plan, RECOMPUTE)}{inside} of {len(plan.segments)}"


def decided(plan: Plan, decision: str) -> int:
    """How many segments meet this decision."""
    return sum(s.decision == decision for s in plan.segments)


def decisions_line(plan: Plan) -> str:
    """Segments, tensors and bytes by decision, in one line."""
    counts = tensor_counts(plan)
    segments = offloaded = ""
    if plan.offloaded_bytes:
        segments = f"{decided(plan, OFFLOAD)} offloaded, "
        offloaded = f"{counts[OFFLOAD]} tensors, {format_bytes(plan.offloaded_bytes)} offloaded, "
    return (
        f"{decided(plan, RECOMPUTE)} of {len(plan.segments)} segments recomputed whole, "
        f"{decided(plan, PARTIAL)} in part, {segments}{decided(plan, KEEP)} kept: "
        f"{counts[RECOMPUTE]} of {counts.total()} tensors, "
        f"{format_bytes(plan.recomputed_bytes)} recomputed, "
        f"{offloaded}{format_bytes(plan.kept_bytes)} kept"
    )


def executor_line(plan: Plan) -> str:
    """How many segments run by each executor."""
    captured = sum(s.variant is not None for s in plan.segments)
    counts = {plan.executor: captured} if captured else {}
    if captured < len(plan.segments):
        counts["module"] = len(plan.segments) - captured
    return ", ".join(f"{name} for {count} segments" for name, count in counts.items())


def uncaptured_notes(plan: Plan) -> list[str]:
    """Why segments that have something inside to plan run as their modules do, by reason."""
    names: dict[str, list[str]] = {}
    for segment in plan.segments:
        if segment.uncaptured is not None and not segment.uncaptured.startswith(SINGLE_LAYER):
            names.setdefault(segment.uncaptured, []).append(segment.name)
    return [
        f"not captured, run by module: {', '.join(found[:3])}"
        + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        + f": {reason}"
        for reason, found in names.items()
    ]


def _add_group(table: Table, group: Group) -> None:
    first = group.members[0]
    table.add_row(
        group.name,
        first.kind,
        format_bytes(first.saved_bytes),
        format_seconds(first.recompute_s) if first.decision != OFFLOAD else "-",
        group.decision,
        style="" if first.decision == KEEP else "cyan",
    )


def _facts(plan: Plan, rates: CopyRates | None) -> list[tuple[str, str | Text]]:
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
        ("decisions", decisions_line(plan)),
        ("executor", executor_line(plan)),
        (
            "time",
            f"{format_seconds(predicted.step_s)} predicted, {slowdown(plan)} baseline; "
            f"no plan is faster than {format_seconds(predicted.lower_bound_s)} "
            f"(gap {predicted.gap:.2%})",
        ),
        ("plan", f"{plan.strategy}, made in {format_seconds(plan.plan_s)}"),
    ]
    copies = planned_line(plan) or why_nothing_moves(plan, rates)
    if copies is not None:
        rows.insert(5, ("copies", copies))
    if predicted.reserved_bytes != predicted.peak_bytes:
        reserved = f"{format_bytes(predicted.reserved_bytes)} predicted in the allocator's hands"
        rows.insert(1, ("reserved", reserved))
    return rows
