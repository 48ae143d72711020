"""Rows to CSV files."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def write_csv(
    path: Path, rows: Iterable[Mapping[str, object]], names: Sequence[str] | None = None
) -> None:
    """Write the rows under `names`, or under the names of the first one."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer: csv.DictWriter[str] | None = None
        if names is not None:  # a table without rows still has its columns
            writer = csv.DictWriter(file, names)
            writer.writeheader()
        for row in rows:
            if writer is None:
                writer = csv.DictWriter(file, list(row))
                writer.writeheader()
            writer.writerow(row)
