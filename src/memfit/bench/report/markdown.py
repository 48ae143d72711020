"""A benchmark as Markdown that can be read by itself."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.bench.report.tables import Table, conclusion, heading, sections
from memfit.ir.bench import BenchReport


def markdown(report: BenchReport, changes: Sequence[str] = ()) -> str:
    """The whole report, with the lines of a comparison with an earlier one."""
    lines = ["# memfit bench", "", *heading(report), ""]
    if changes:
        lines += ["## Against the earlier benchmark", "", *(f"- {c}" for c in changes), ""]
    if said := conclusion(report):
        lines += ["## In all", "", *(f"- {line}" for line in said), ""]
    for section in sections(report):
        lines += [f"## {section.title}", ""]
        for table in section.tables:
            lines += [f"{table.title}:", ""] if table.title else []
            lines += [*table_lines(table), ""]
            lines += [table.note, ""] if table.note else []
        lines += [f"- {line}" for line in section.lines] + ([""] if section.lines else [])
    return "\n".join(lines)


def table_lines(table: Table) -> list[str]:
    """One table."""
    rows = [[_escape(word) for word in row] for row in [list(table.columns), *table.rows]]
    return [
        f"| {' | '.join(rows[0])} |",
        f"|{'---|' * len(table.columns)}",
        *(f"| {' | '.join(row)} |" for row in rows[1:]),
    ]


def _escape(text: str) -> str:
    """Text that stays within its cell."""
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").split())
