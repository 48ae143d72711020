"""Rows to CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO


def write_csv(
    path: Path, rows: Iterable[Mapping[str, object]], names: Sequence[str] | None = None
) -> None:
    """Write the rows under `names`, or under the names of the first one."""
    with path.open("w", newline="", encoding="utf-8") as file:
        _write(file, rows, names)


def csv_text(rows: Iterable[Mapping[str, object]], names: Sequence[str]) -> str:
    """The rows under `names`, with plain line ends."""
    text = io.StringIO()
    _write(text, rows, names, "\n")
    return text.getvalue()


def _write(
    file: TextIO,
    rows: Iterable[Mapping[str, object]],
    names: Sequence[str] | None,
    line_end: str = "\r\n",
) -> None:
    writer: csv.DictWriter[str] | None = None
    if names is not None:  # a table without rows still has its columns
        writer = csv.DictWriter(file, names, lineterminator=line_end)
        writer.writeheader()
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(file, list(row), lineterminator=line_end)
            writer.writeheader()
        writer.writerow(row)
