"""The line that follows a loop."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from memfit.errors import UsageError
from memfit.observe import live as module
from memfit.observe.live import LiveLine
from memfit.observe.memory import MemoryProfiler
from memfit.report.live import LiveStatus, live_line

Make = Callable[..., MemoryProfiler]
MIB = 2**20


def screen(terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=120, force_terminal=terminal, no_color=True)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_line_says_memory_speed_and_copies() -> None:
    status = LiveStatus(7, 300 * MIB, 800 * MIB, 1000 * MIB, 2.0, 64.0, "tokens", 3)
    line = live_line(status).plain
    assert "step 7" in line
    assert "300.00 MiB / 1000.00 MiB" in line
    assert "peak 800.00 MiB (80%)" in line
    assert "64.0 tokens/s" in line and "3 copies in flight" in line
    assert line.count("█") == 6 and line.count("▒") == 10 and line.count("·") == 4


@pytest.mark.parametrize("file", [True, False])
def test_what_a_loop_prints_goes_to_its_file_and_on_a_terminal_above_the_line(
    profiler: Make, tape: Any, monkeypatch: pytest.MonkeyPatch, file: bool
) -> None:
    console, output = screen(terminal=True), io.StringIO()
    monkeypatch.setattr(output, "isatty", lambda: not file)
    monkeypatch.setattr(sys, "stdout", output)
    with profiler() as memory, LiveLine(memory, console=console):
        memory.record_step(0)
        print("loss 1.25")
    shown = text_of(console)
    assert ("loss 1.25" in output.getvalue(), "loss 1.25" in shown) == (file, not file)
    assert "step 0" in shown


def test_without_samples_and_copies_the_line_has_steps() -> None:
    line = live_line(LiveStatus(0, MIB, MIB, 2 * MIB, 4.0)).plain
    assert "4.00 steps/s" in line and "copies" not in line


@pytest.mark.parametrize(("peak", "colour"), [(500, "green"), (950, "yellow"), (1100, "red")])
def test_the_bar_warns(peak: int, colour: str) -> None:
    line = live_line(LiveStatus(0, 100 * MIB, peak * MIB, 1000 * MIB))
    assert any(span.style == colour for span in line.spans)
    assert len(line.plain.split("  ")[1]) == 20


def test_it_follows_the_loop(profiler: Make, tape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(clock)))
    console = screen(terminal=True)
    copies = iter(range(100))
    memory = profiler(times=False)
    monkeypatch.setattr(module, "_EVERY_S", 0.0)
    line = LiveLine(
        memory, budget="1GiB", samples=lambda: 32, copies=lambda: next(copies), console=console
    )
    with memory, line:
        assert line.status is None
        for _ in memory.steps(range(3)):
            with memory.phase("train"):
                tape.set(700, 200)
        status = line.status
    assert status is not None
    assert (status.step, status.used_bytes, status.peak_bytes) == (2, 200 * MIB, 700 * MIB)
    assert (status.budget_bytes, status.unit) == (1024 * MIB, "samples")
    assert status.rate == pytest.approx(32 * (status.steps_per_s or 0))
    shown = text_of(console)
    for step in range(3):
        assert f"step {step}" in shown
    assert "copies in flight" in shown


def test_phases_recorded_one_by_one_are_one_step(
    profiler: Make, tape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    memory = profiler(times=False)
    with memory, LiveLine(memory, samples=lambda: 10, console=screen(terminal=False)) as line:
        for step in range(4):
            for phase in ("forward", "backward", "optimizer"):
                now[0] += 0.5
                memory.record_step(step, phase)
        status = line.status
    assert status is not None and status.steps_per_s == pytest.approx(1 / 1.5)
    assert status.rate == pytest.approx(10 / 1.5)


def test_where_there_is_no_terminal_it_is_written_once(profiler: Make, tape: Any) -> None:
    console = screen(terminal=False)
    with profiler() as memory, LiveLine(memory, samples=4, console=console):
        for _ in memory.steps(range(5)):
            tape.set(300, 100)
    lines = [line for line in text_of(console).splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("step 4")
    assert "100.00 MiB / 1000.00 MiB" in lines[0]


def test_a_loop_without_steps_shows_nothing(profiler: Make) -> None:
    console = screen(terminal=False)
    with profiler() as memory, LiveLine(memory, console=console):
        pass
    assert not text_of(console).strip()


def test_the_profiler_forgets_a_line_that_is_left(profiler: Make) -> None:
    with profiler() as memory:
        with LiveLine(memory, console=screen(terminal=False)):
            memory.record_step(0)
        memory.record_step(1)
        assert not memory._listeners


def test_bad_use_is_refused(profiler: Make) -> None:
    memory = profiler()
    with pytest.raises(UsageError, match="budget is 0"):
        LiveLine(memory, budget=0)
    line = LiveLine(memory, console=screen(terminal=False))
    with line, pytest.raises(UsageError, match="shown already"):
        line.__enter__()
