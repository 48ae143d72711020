"""What a run takes before and after, as a table on the terminal and in Markdown."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from memfit.ir.resources import Amount, Resource, Resources, Unit
from memfit.report.terminal import columns, facts, headline
from memfit.units import format_bytes, format_seconds

_HOUR, _DAY = 3600, 86400


def resources_report(found: Resources) -> list[RenderableType]:
    """The table with a mark at every number, and what the run is."""
    table = columns("", "before", "", "with the plan", "", "change", text=[""])
    for row in found.rows:
        cells = [*_cells(row.before, row.unit), *_cells(row.after, row.unit)]
        table.add_row(row.name, *cells, _change(row))
    rows: list[tuple[str, str | Text]] = [
        ("budget", f"{format_bytes(found.budget_bytes)} ({found.verdict})"),
        ("run", _run(found)),
        *_reasons(found),
    ]
    return [headline(found.workload, found.device), table, facts(rows)]


def resources_markdown(found: Resources) -> str:
    """The same as a document."""
    lines = [
        f"# Resources of {found.workload['name']}",
        "",
        f"{found.workload['model']}, {found.workload['batch']}, {found.workload['optimizer']}, "
        f"{found.device['name']}; budget {format_bytes(found.budget_bytes)} ({found.verdict}); "
        f"run: {_run(found)}.",
        "",
        "| | before | | with the plan | | change |",
        "|---|---|---|---|---|---|",
    ]
    for row in found.rows:
        cells = [*_cells(row.before, row.unit), *_cells(row.after, row.unit)]
        lines.append(f"| {row.name} | {' | '.join(cells)} | {_change(row)} |")
    lines += ["", *(f"- {name}: {why}" for name, why in _reasons(found))]
    return "\n".join(lines).rstrip() + "\n"


def _cells(amount: Amount, unit: Unit) -> tuple[str, str]:
    return "-" if amount.value is None else _text(amount.value, unit), amount.how


def _text(value: float, unit: Unit) -> str:
    if unit == "bytes":
        return format_bytes(value)
    if unit == "samples/s":
        return f"{value:.4g} samples/s"
    if value < _HOUR:
        return format_seconds(value)
    return f"{value / _HOUR:.1f} h" if value < _DAY else f"{value / _DAY:.1f} days"


def _change(row: Resource) -> str:
    return "" if row.change is None else f"{row.change:+.1%}"


def _run(found: Resources) -> str:
    if found.samples is None:
        return "of unknown length"
    epochs = "" if found.epochs is None else f", {found.epochs} epochs"
    return f"{found.samples} samples{epochs}"


def _reasons(found: Resources) -> list[tuple[str, str]]:
    """Why numbers are missing or not measured, each reason once."""
    reasons: dict[str, list[str]] = {}
    for row in found.rows:
        for amount in (row.before, row.after):
            if amount.why is not None and row.name not in reasons.setdefault(amount.why, []):
                reasons[amount.why].append(row.name)
    return [(", ".join(names), why) for why, names in reasons.items()]
