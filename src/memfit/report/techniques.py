"""The techniques of a plan: what each saves and costs, and why it was taken or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from rich.table import Table

from memfit.ir.plan import Plan, TechniqueChoice
from memfit.report.terminal import columns
from memfit.units import format_bytes, format_seconds

Number = TypeVar("Number", int, float)


def technique_tables(
    plan: Plan, *, explain: bool, left_out: Mapping[str, str] | None = None
) -> list[Table]:
    """What the plan takes, in the order it was taken; with `explain` all that was tried, and why.

    Nothing, unless there was more to choose from than what happens to activations. `left_out` says
    why others were not tried, by technique.
    """
    if not plan.choices and not explain:
        return []
    shown = [row for row in technique_rows(plan) if explain or row.taken]
    if explain:
        told = {name for row in shown for name in row.name.split(" and ")}
        more = (left_out or {}).items()
        shown += [TechniqueChoice(name, False, why) for name, why in more if name not in told]
    names = ["technique", "", "saves", "costs"]
    table = columns(*names, *(["why"] if explain else []), text=names[:2], wrap=("why",))
    for row in shown:
        table.add_row(
            row.name,
            "taken" if row.taken else "not taken",
            _signed(row.saved_bytes, format_bytes),
            _signed(row.cost_s, format_seconds),
            *([row.why] if explain else []),
            style="" if row.taken else "dim",
        )
    return [table]


def technique_rows(plan: Plan) -> list[TechniqueChoice]:
    """The choices of the whole step, and what the plan does with activations on top of them."""
    taken = [choice for choice in plan.choices if choice.taken]
    unplanned_bytes = plan.baseline_peak_bytes - sum(c.saved_bytes or 0 for c in taken)
    unplanned_s = plan.baseline_step_s + sum(c.cost_s or 0 for c in taken)
    kinds = {"recompute": plan.recomputed_bytes, "offload": plan.offloaded_bytes}
    used = [name for name, size in kinds.items() if size]
    activations = TechniqueChoice(
        name=" and ".join(used) or "recompute",
        taken=bool(used),
        why="the fastest plan that fits" if used else "everything fits without it",
        saved_bytes=unplanned_bytes - plan.predicted.peak_bytes if used else None,
        cost_s=plan.predicted.step_s - unplanned_s if used else None,
    )
    rest = [choice for choice in plan.choices if not choice.taken]
    return [*taken, activations, *rest]


def _signed(value: Number | None, form: Callable[[Number], str]) -> str:
    if value is None:
        return "-"
    return f"-{form(-value)}" if value < 0 else form(value)
