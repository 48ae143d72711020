"""The pieces that every table on the terminal is made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memfit.ir.step_graph import CATEGORIES
from memfit.units import format_bytes

MIB = 2**20


def headline(workload: Mapping[str, str], device: Mapping[str, Any]) -> Text:
    """What is trained, on what."""
    parts = [workload["model"], workload["batch"], workload["optimizer"], device["name"]]
    return Text.assemble((workload["name"], "bold"), "  ", (", ".join(parts), "dim"))


class Verbatim(Table):
    """A table that shows strings as they are: brackets in a name or an error are not markup."""

    def add_column(self, header: RenderableType = "", *args: Any, **how: Any) -> None:
        """Add a column under this head."""
        super().add_column(_verbatim(header), *args, **how)

    def add_row(self, *cells: RenderableType | None, **how: Any) -> None:
        """Add a row of these cells."""
        super().add_row(*(_verbatim(cell) for cell in cells), **how)


def _verbatim(cell: Any) -> Any:
    return Text(cell) if isinstance(cell, str) else cell


def columns(
    *names: str, text: Sequence[str] = (), wrap: Sequence[str] = (), title: str | None = None
) -> Table:
    """A table with these columns: `text` ones to the left, `wrap` ones may take several lines."""
    table = Verbatim(
        box=box.SIMPLE_HEAD,
        title=None if title is None else Text(title, "bold"),
        title_justify="left",
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in names:
        table.add_column(
            name,
            justify="left" if name in text or name in wrap else "right",
            overflow="fold" if name in wrap else "ellipsis",
            no_wrap=name not in wrap,
        )
    return table


def span_name(first: str, last: str) -> str:
    """Names from first to last: "layers.0 .. 11"."""
    if first == last:
        return first
    folder, dot, _ = first.rpartition(".")
    return f"{first} .. {last.removeprefix(folder + dot)}" if dot else f"{first} .. {last}"


def facts(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """A name and what is to be said about it, one per row."""
    table = Verbatim(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def category_table(title: str, categories: Mapping[str, int], total_name: str) -> Table:
    """Bytes by category under a title; the last row is their sum."""
    table = columns(title, "bytes", "share", text=[title])
    total = sum(categories.values())
    order = [*CATEGORIES, *(name for name in categories if name not in CATEGORIES)]
    shown = [(name, categories[name]) for name in order if categories.get(name)]
    for name, size in shown:
        table.add_row(name.replace("_", " "), format_bytes(size), share(size, total))
    table.add_section()
    table.add_row(total_name, format_bytes(total), "", style="bold")
    return table


def note_lines(notes: Sequence[str], most: int = 6) -> list[Text]:
    """The choices made for the user, many alike cut short."""
    shown = list(notes[:most])
    if len(notes) > most:
        shown.append(f"and {len(notes) - most} more of this kind (--json has them all)")
    return [Text.assemble(("note: ", "bold"), note) for note in shown]


def share(part: float, whole: float) -> str:
    """A part of a whole in percent."""
    return f"{part / whole:.1%}" if whole else "-"


def ratio(value: float | None) -> str:
    """A ratio of two times: "1.083x"; "-" when there is none."""
    return "-" if value is None else f"{value:.3f}x"


def budget_word(size: int) -> str:
    """A budget of at least `size` bytes as it is typed: "1207MiB", or the bytes of a small one."""
    mebibytes = math.ceil(size / MIB)
    return f"{mebibytes}MiB" if size >= 100 * MIB else str(size)
