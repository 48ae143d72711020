"""A line on the terminal that follows a training loop."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.live import Live

from memfit.errors import UsageError
from memfit.observe.memory import MemoryProfiler
from memfit.report.live import LiveStatus, live_line
from memfit.units import parse_bytes

_EVERY_S = 0.2  # between two drawings: a terminal is slower than a step
_WINDOW = 20  # steps that the speed is taken over


class LiveLine:
    """Shows memory against a budget, the peak, the speed and copies under way, on stderr.

        with MemoryProfiler() as memory, LiveLine(memory, budget="16GiB", samples=32):
            for batch in memory.steps(loader):
                ...

    `samples` is how many each step sees (`unit="tokens"` names them); a function is asked after
    each step. `copies` says how many are in flight: `lambda: fitted.applied.copies_in_flight`, or
    `lambda: valve.copies_in_flight` of a memfit.pressure.
    Drawn at most five times a second; where stderr is no terminal, once, at the end. Memory that
    CUDA graphs use is not in it: a profiler knows how much that is when it stops.
    """

    def __init__(
        self,
        memory: MemoryProfiler,
        *,
        budget: int | str | None = None,
        samples: float | Callable[[], float] | None = None,
        unit: str = "samples",
        copies: Callable[[], int] | None = None,
        console: Console | None = None,
    ) -> None:
        self._memory = memory
        self._budget = None if budget is None else parse_bytes(budget)
        if self._budget is not None and self._budget <= 0:
            raise UsageError(f"budget is {budget!r}, not above zero", hint='budget="16GiB"')
        self._samples, self._unit, self._copies = samples, unit, copies
        self._console = console or Console(stderr=True)
        self._live: Live | None = None
        self._unlisten: Callable[[], None] | None = None
        self._ends: deque[tuple[float, float]] = deque(maxlen=_WINDOW + 1)  # moment, samples
        self._step: int | None = None  # the last that ended, or whose first phases did
        self._drawn_s = 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            raise UsageError("the live line is shown already", hint="enter it once")
        # What a loop prints scrolls above the line, but for what a file or a pipe is to have.
        self._live = Live(
            console=self._console, auto_refresh=False, redirect_stdout=sys.stdout.isatty()
        )
        self._ends.append((time.perf_counter(), 0.0))
        self._unlisten = self._memory.listen(self._stepped)
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._live is not None and self._unlisten is not None
        self._unlisten()
        status = self.status
        if self._console.is_terminal:
            self._draw()
            self._live.stop()
        elif status is not None:
            self._console.print(live_line(status), soft_wrap=True)
        self._live = None

    @property
    def status(self) -> LiveStatus | None:
        """What the line says now; None before the first step."""
        record = self._memory.latest
        if record is None or record.reading is None:
            return None
        (begun_s, _), (now_s, _) = self._ends[0], self._ends[-1]
        seconds = now_s - begun_s
        seen = sum(samples for _, samples in list(self._ends)[1:])
        steps = len(self._ends) - 1
        return LiveStatus(
            step=record.step,
            used_bytes=record.reading.final_bytes,
            peak_bytes=self._memory.highest_bytes,
            budget_bytes=self._budget or self._memory.capacity_bytes,
            steps_per_s=steps / seconds if seconds > 0 else None,
            rate=seen / seconds if self._samples is not None and seconds > 0 else None,
            unit=self._unit,
            copies=None if self._copies is None else self._copies(),
        )

    def _stepped(self) -> None:
        now_s, latest = time.perf_counter(), self._memory.latest
        assert latest is not None, "told of a step that was not recorded"
        if latest.step == self._step:  # of which another phase was recorded
            self._ends[-1] = now_s, self._ends[-1][1]
        else:
            self._step = latest.step
            samples = self._samples() if callable(self._samples) else self._samples
            self._ends.append((now_s, samples or 0.0))
        if self._ends[-1][0] - self._drawn_s >= _EVERY_S:
            self._draw()

    def _draw(self) -> None:
        status = self.status
        if self._live is not None and status is not None and self._console.is_terminal:
            self._drawn_s = time.perf_counter()
            self._live.update(live_line(status), refresh=True)
