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
            },
            "num_recomputed": None if plan is None else decided(plan, RECOMPUTE),
            "num_partial": None if plan is None else decided(plan, PARTIAL),
        }
        for row in rows
        for strategy, plan in row.plans.items()
    ]


def _one(rows: Sequence[SweepRow], strategy: str, baseline_bytes: int) -> Table:
    table = columns(
        "budget", "of baseline", "predicted peak", "predicted time", "slowdown", "recomputed"
    )
    for row in rows:
        plan = row.plans[strategy]
        cells = ["-"] * 4
        if plan is not None:
            cells = [
                format_bytes(plan.predicted.peak_bytes),
                format_seconds(plan.predicted.step_s),
                slowdown(plan),
                recomputed(plan),
            ]
        table.add_row(_size(row), f"{row.budget_bytes / baseline_bytes:.0%}", *cells)
    return table


def _size(row: SweepRow) -> str:
    return format_bytes(row.budget_bytes)
