"""The tables of a benchmark on a terminal: remarks stand below, where they have room."""

from __future__ import annotations

from rich.table import Table as Shown

from memfit.bench.report.labels import broken
from memfit.bench.report.tables import Table
from memfit.report.terminal import columns

NAME_WIDTH = 24  # of the first column: with numbers of ten thousands a table takes 100 characters
REMARKS = "remarks"


def shown_table(table: Table) -> tuple[Shown, list[str]]:
    """The table without its remarks, names broken between words; and the remarks as lines."""
    below = table.columns[-1] == REMARKS
    names = table.columns[:-1] if below else table.columns
    heads = [name.replace(" MB", "\nMB") for name in names]
    shown = columns(*heads, text=heads[:1], wrap=() if below else heads[-1:])
    remarks = []
    for row in table.rows:
        shown.add_row(broken(row[0], NAME_WIDTH), *row[1 : len(names)])
        if below and row[-1]:
            what = row[0] if names[0] == "system" else f"{names[0]} {row[0]}"
            remarks.append(f"{what}: {row[-1]}")
    return shown, remarks
