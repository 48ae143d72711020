"""Loops that end in an error: what was seen of the step that failed, and what the report says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from memfit.ir.file_check import fault_in_series
from memfit.measure.census import live_tensors
from memfit.observe.memory import MemoryProfiler
from memfit.report.memory_series import memory_report

Make = Callable[..., MemoryProfiler]


def used(memory: MemoryProfiler) -> list[tuple[int, str, float]]:
    return [(s.step, s.phase, s.used_mb) for s in memory.snapshots]


def test_a_step_that_fails_is_in_the_series(profiler: Make, tape: Any) -> None:
    memory = profiler()
    with pytest.raises(RuntimeError, match="out of memory"):
        with memory:
            for _ in memory.steps(range(5)):
                with memory.phase("forward"):
                    tape.set(900)
                    raise RuntimeError("out of memory")
    assert (memory.peak_step, memory.peak_phase, memory.peak_usage_mb) == (0, "forward", 900)
    assert tape.closed == 1
    profiler().start().stop()  # and the next one may start
    assert memory.series.notes[0] == "ended in step 0, forward, by RuntimeError: out of memory"


def test_a_loop_of_two_calls_that_failed_lost_its_last_step(profiler: Make, tape: Any) -> None:
    """Its peak was in no record, and it was named one too low."""
    memory = profiler()
    with pytest.raises(RuntimeError, match="out of memory"):
        with memory:
            for step in range(5):
                tape.set(300 + 300 * step, 100)
                if step == 2:
                    raise RuntimeError("out of memory")
                memory.record_step(step, "train")
    assert used(memory) == [(0, "train", 300), (1, "train", 600), (2, "other", 900)]
    assert (memory.peak_step, memory.peak_usage_mb) == (2, 900)
    assert memory.series.notes[0] == "ended in step 2, other, by RuntimeError: out of memory"
    assert tape.closed == 1
    assert fault_in_series(memory.series) is None


def test_a_loop_of_two_calls_that_failed_at_once_ended_in_step_minus_one(
    profiler: Make, tape: Any
) -> None:
    memory = profiler()
    with pytest.raises(RuntimeError, match="mine"):
        with memory:
            tape.set(700)
            raise RuntimeError("mine")
    assert used(memory) == [(0, "other", 700)]
    assert memory.series.notes[0] == "ended in step 0, other, by RuntimeError: mine"
    assert "ended in step 0" in memory.generate_report()


def test_a_step_that_failed_outside_of_its_phases_is_recorded_once(
    profiler: Make, tape: Any
) -> None:
    memory = profiler()
    with pytest.raises(RuntimeError, match="mine"):
        with memory:
            for _ in range(2):
                with memory.step():
                    with memory.phase("forward"):
                        tape.set(200)
                tape.set(100)
            with memory.step():
                tape.set(800, 100)
                raise RuntimeError("mine")
    rows = [("forward", 200), ("other", 200)]
    finished = [(step, *row) for step in (0, 1) for row in rows]
    assert used(memory) == [*finished, (2, "step", 800)]
    assert memory.series.notes[0] == "ended in step 2, other, by RuntimeError: mine"


def test_what_fails_between_two_steps_counts_to_the_next(profiler: Make, tape: Any) -> None:
    memory = profiler()
    with pytest.raises(RuntimeError, match="mine"):
        with memory:
            with memory.step():
                tape.set(200, 100)
            tape.set(500, 100)  # a validation, say
            raise RuntimeError("mine")
    assert used(memory) == [(0, "step", 200), (1, "other", 500)]


def test_the_memory_of_a_loader_that_fails_was_lost(profiler: Make, tape: Any) -> None:
    def loader() -> Iterator[int]:
        tape.set(600, 100)
        raise OSError("disk")
        yield 1

    memory = profiler()
    with pytest.raises(OSError, match="disk"):
        with memory:
            list(memory.steps(loader()))
    assert used(memory) == [(0, "loader", 600)]
    assert memory.series.notes[0] == "ended in step 0, loader, by OSError: disk"


def test_ctrl_c_ends_no_step(profiler: Make) -> None:
    memory = profiler()
    with pytest.raises(KeyboardInterrupt):
        with memory:
            memory.record_step(0)
            raise KeyboardInterrupt
    assert memory.series.steps == (0,) and not memory.series.notes


def test_what_was_live_when_a_loop_failed_is_told() -> None:
    memory = MemoryProfiler("cpu")
    layer = torch.nn.Linear(300, 300)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        with memory:
            for _ in memory.steps(range(2)):
                with memory.phase("backward"):
                    hidden = layer(torch.ones(7, 300))
                    hidden.sum().backward()
                    torch.empty(2**50)
    ended, live, largest = memory.series.notes
    assert "DefaultCPUAllocator" in ended and "in step 0, backward" in ended
    assert all(word in live for word in ("parameters", "gradients", "activations"))
    assert "largest: " in largest
    report = memory.generate_report()
    assert "[enforce fail" in report and "live then" in report
    kinds, _ = live_tensors(torch.device("cpu"))
    assert kinds["gradients"] >= layer.weight.nbytes


def test_a_loop_that_goes_on_after_an_error_did_not_end_by_it(profiler: Make) -> None:
    with profiler() as memory:
        with pytest.raises(ValueError, match="mine"), memory.step(), memory.phase("forward"):
            raise ValueError("mine")
        with memory.step():
            pass
    assert not memory.series.notes


def test_a_loader_that_fails_leaves_no_step_behind(profiler: Make) -> None:
    def loader() -> Iterator[int]:
        yield 1
        raise OSError("disk")

    with profiler() as memory:
        with pytest.raises(OSError, match="disk"):
            list(memory.steps(loader()))
        with memory.step():
            pass
    assert memory.series.steps == (0, 1)


def test_a_report_of_nothing_dropped_its_notes(profiler: Make) -> None:
    with profiler() as memory:
        pass
    report = memory_report(replace(memory.series, notes=("the reason",)))
    assert report.splitlines()[0] == "memory: nothing was recorded"
    assert "note" in report and "the reason" in report
