"""Compile what cells need before any is timed, several at once, into the cache that they share.

Compiling a whole model keeps one core busy for a minute or more. Cells run one after another, so
that each has the device to itself: they would compile one after another as well.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from memfit.bench.cell import CellSpec
from memfit.bench.order import most_valuable_first
from memfit.bench.process import cell_processes
from memfit.bench.systems.catalogue import FAMILIES, split_name

Say = Callable[[str], None]


def compile_ahead(
    cells: Sequence[CellSpec],
    folder: Path,
    at_once: int,
    timeout_s: float,
    say: Say,
    log: Path | None = None,
) -> None:
    """Let so many processes at once compile for those cells whose system compiles all its code.

    Whatever becomes of one, its cell will tell: it compiles what is missing. What is not begun
    within `timeout_s` is left to the cells.
    """
    chosen = [c for c in cells if FAMILIES[split_name(c.system)[0]].compiles]
    waiting = deque(replace(c, compile_only=True) for c in most_valuable_first(chosen))
    if not waiting:
        return
    begun = time.monotonic()
    say(f"compiling for {len(waiting)} cells, {at_once} at once")

    def work() -> None:
        with cell_processes(chosen, folder, say) as run:
            while waiting and (left_s := begun + timeout_s - time.monotonic()) > 0:
                try:
                    spec = waiting.popleft()
                except IndexError:  # another one was quicker
                    return
                run(spec, left_s, log)

    # Daemons: when this process is interrupted, their servers see it go and end what they run.
    workers = [
        threading.Thread(target=work, daemon=True) for _ in range(min(at_once, len(waiting)))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    say(f"compiled in {time.monotonic() - begun:.0f} s")
