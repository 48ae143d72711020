"""Budgets against what they are expected to cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table

from memfit.ir.plan import PARTIAL, RECOMPUTE, Plan
from memfit.report.plan import decided, recomputed, slowdown
from memfit.report.terminal import columns
from memfit.units import format_bytes, format_seconds


@dataclass(frozen=True)
class SweepRow:
    """The plan of each strategy for one budget; None where it has none."""

    budget_bytes: int
    plans: Mapping[str, Plan | None]


def sweep_table(rows: Sequence[SweepRow], baseline_bytes: int, baseline_s: float) -> Table:
    """One row per budget: the plan of a strategy, or several strategies side by side."""
    strategies = list(rows[0].plans)
    if len(strategies) == 1:
        return _one(rows, strategies[0], baseline_bytes)
    title = f"predicted time by strategy, against {format_seconds(baseline_s)} with everything kept"
    table = columns("budget", "of baseline", *strategies, title=title)
    for row in rows:
        cells: list[RenderableType] = [
            "-" if plan is None else slowdown(plan) for plan in row.plans.values()
        ]
        table.add_row(_size(row), f"{row.budget_bytes / baseline_bytes:.0%}", *cells)
    return table


def sweep_data(rows: Sequence[SweepRow]) -> list[dict[str, object]]:
    """The rows as plain data."""
    return [
        {
            "budget_bytes": row.budget_bytes,
            "strategy": strategy,
            "feasible": plan is not None,
            "predicted": None
            if plan is None
            else {
                "peak_bytes": plan.predicted.peak_bytes,
                "peak_reserved_bytes": plan.predicted.reserved_bytes,
                "step_s": plan.predicted.step_s,
                "slowdown": plan.predicted.step_s / plan.baseline_step_s,
                "copy_s": plan.predicted.copy_s,
                "stall_s": plan.predicted.stall_s,
            },
            "num_recomputed": None if plan is None else decided(plan, RECOMPUTE),
            "num_partial": None if plan is None else decided(plan, PARTIAL),
            "offloaded_bytes": None if plan is None else plan.offloaded_bytes,
        }
        for row in rows
        for strategy, plan in row.plans.items()
    ]


def _one(rows: Sequence[SweepRow], strategy: str, baseline_bytes: int) -> Table:
    names = ["budget", "share", "peak", "time", "slowdown", "recomputed"]
    plans = [row.plans[strategy] for row in rows]
    moves = any(plan.offloaded_bytes for plan in plans if plan is not None)
    title = "predicted, by budget and its share of the baseline"
    table = columns(*names, *(["to host"] if moves else []), title=title)
    for row, plan in zip(rows, plans, strict=True):
        cells = ["-"] * (4 + moves)
        if plan is not None:
            cells = [
                format_bytes(plan.predicted.peak_bytes),
                format_seconds(plan.predicted.step_s),
                slowdown(plan),
                recomputed(plan),
                *([format_bytes(plan.offloaded_bytes)] if moves else []),
            ]
        table.add_row(_size(row), f"{row.budget_bytes / baseline_bytes:.0%}", *cells)
    return table


def _size(row: SweepRow) -> str:
    return format_bytes(row.budget_bytes)
