"""How far a benchmark has come: a bar on a terminal, else a line for each cell, on stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from memfit.bench.cell import CellSpec
    from memfit.ir.bench import Cell


class Shown(Protocol):
    """Is told what begins and what has ended."""

    def started(self, spec: CellSpec) -> None: ...

    def ended(self, cell: Cell) -> None: ...

    def say(self, text: str) -> None: ...


@contextmanager
def showing_progress(missing: Sequence[CellSpec], total: int) -> Iterator[Shown]:
    """Show progress until the block is left."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _Lines(console, len(missing), total)
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress, len(missing), total)


class _Bar:
    def __init__(self, progress: Progress, missing: int, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total, completed=total - missing)

    def started(self, spec: CellSpec) -> None:
        text = f"{spec.workload.name} | {spec.system}"
        self._progress.update(self._task, description=text)

    def ended(self, cell: Cell) -> None:
        self._progress.advance(self._task)

    def say(self, text: str) -> None:
        self._progress.console.print(Text(text), soft_wrap=True)


class _Lines:
    def __init__(self, console: Console, missing: int, total: int) -> None:
        self._console, self._total = console, total
        self._done = total - missing
        self._begun: dict[str, float] = {}

    def started(self, spec: CellSpec) -> None:
        self._begun[f"{spec.workload.name} | {spec.system}"] = time.monotonic()

    def ended(self, cell: Cell) -> None:
        self._done += 1
        what = cell.status if cell.ratio is None else f"{cell.status}, {cell.ratio:.3f}x"
        seconds = time.monotonic() - self._begun[cell.key]
        text = f"[{self._done}/{self._total}] {cell.key}: {what} ({seconds:.0f} s)"
        self.say(text)

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
