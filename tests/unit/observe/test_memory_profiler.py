"""The memory profiler on memory that the test sets: what is recorded where, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from memfit.errors import MemfitError, UsageError
from memfit.ir.memory_series import MB, MemorySeries, Spike
from memfit.observe.memory import MemoryProfiler

Make = Callable[..., MemoryProfiler]


def used(memory: MemoryProfiler) -> list[tuple[int, str, float]]:
    return [(s.step, s.phase, s.used_mb) for s in memory.snapshots]


def test_two_calls_in_a_loop_see_peaks_inside_the_steps(profiler: Make, tape: Any) -> None:
    memory = profiler()
    memory.start()
    for step, highest in enumerate((300, 250, 700, 260)):
        tape.set(highest, 120 + step)  # up and down again before anybody looks
        memory.record_step(step, "warmup" if step == 0 else "train")
    memory.stop()
    assert used(memory) == [
        (0, "warmup", 300),
        (1, "train", 250),
        (2, "train", 700),
        (3, "train", 260),
    ]
    assert memory.peak_usage_bytes == 700 * MB
    assert memory.peak_usage_mb == 700
    assert memory.peak_usage_gb == pytest.approx(700 / 1024)
    assert (memory.peak_step, memory.peak_phase) == (2, "train")
    assert memory.phase_statistics()["train"] == pytest.approx((1210 / 3, 700, 250))
    assert memory.identify_spikes(100) == [Spike(2, 450, "train")]
    series = memory.series
    assert (series.initial_bytes, series.final_bytes) == (100 * MB, 123 * MB)
    assert series.unused_share == pytest.approx(0.5)
    assert series.fragmentation is None
    assert tape.closed == 1


def test_phases_and_what_lies_between_them_are_told_apart(profiler: Make, tape: Any) -> None:
    with profiler() as memory:
        for _ in range(2):
            tape.set(110, 105)  # before the step: nobody's phase
            with memory.step():
                with memory.phase("forward"):
                    tape.set(300)
                tape.set(310, 290)
                with memory.phase("backward"):
                    tape.set(400, 150)
                with memory.phase("optimizer"):
                    tape.set(200, 100)
    expected = [("forward", 300), ("backward", 400), ("optimizer", 200), ("other", 310)]
    assert used(memory) == [(step, *row) for step in (0, 1) for row in expected]


def test_what_lies_between_phases_is_not_read_where_it_is_next_to_nothing(
    profiler: Make, tape: Any
) -> None:
    tape.unread_s = 60.0
    with profiler() as memory:
        for _ in memory.steps(range(2)):
            with memory.phase("forward"):
                tape.set(300, 290)
            tape.set(310, 290)  # counts to what follows
            with memory.phase("backward"):
                tape.set(250, 120)
    rows = [("forward", 300), ("backward", 310), ("other", 290)]
    assert used(memory) == [
        (0, "loader", 100),
        *[(0, *row) for row in rows],
        (1, "loader", 120),
        *[(1, *row) for row in rows],
    ]
    assert tape.readings == 1 + 2 * 3 + 1  # the beginning, three phases each, no third batch
    assert sum(memory.series.phase_seconds().values()) > 0


def test_what_comes_after_the_last_step_is_none_of_it(profiler: Make, tape: Any) -> None:
    tape.unread_s = 60.0
    with profiler() as memory:
        for _ in range(2):
            with memory.step(), memory.phase("forward"):
                tape.set(300, 120)
        tape.set(500, 100)  # a validation, say
    rows = [("forward", 300), ("other", 120)]
    assert used(memory) == [(step, *row) for step in (0, 1) for row in rows]
    with profiler() as memory:
        for number in memory.steps(range(9)):
            with memory.phase("forward"):
                tape.set(300, 110)
            tape.set(310, 120)
            if number == 1:
                break
        tape.set(500, 100)
    assert used(memory)[-2:] == [(1, "forward", 300), (1, "other", 310)]


def test_a_step_without_phases_is_read_however_short(profiler: Make, tape: Any) -> None:
    tape.unread_s = 60.0
    with profiler() as memory:
        for _ in range(2):
            with memory.step():
                tape.set(150, 120)
    assert used(memory) == [(0, "step", 150), (1, "step", 150)]


def test_parts_of_the_same_name_are_one_phase(profiler: Make, tape: Any) -> None:
    with profiler() as memory, memory.step(7):
        for highest in (200, 500, 300):
            with memory.phase("micro-batch"):
                tape.set(highest, 100)
    assert used(memory) == [(7, "micro-batch", 500), (7, "other", 100)]


def test_a_step_without_phases_is_one(profiler: Make, tape: Any) -> None:
    with profiler() as memory, memory.step():
        tape.set(150, 120)
    assert used(memory) == [(0, "step", 150)]


def test_steps_of_a_loader_wait_for_batches_in_a_phase(profiler: Make, tape: Any) -> None:
    def loader() -> Iterator[str]:
        for name in "ab":
            tape.set(180, 100)
            yield name

    with profiler() as memory:
        seen = []
        for batch in memory.steps(loader()):
            seen.append(batch)
            with memory.phase("train"):
                tape.set(400, 100)
        for batch in memory.steps(["c"]):  # another epoch: steps count on
            seen.append(batch)
    assert seen == ["a", "b", "c"]
    rows = [("loader", 180), ("train", 400), ("other", 100)]
    assert used(memory)[:6] == [(step, *row) for step in (0, 1) for row in rows]
    assert used(memory)[6:] == [(2, "loader", 100), (2, "other", 100)]


def test_a_loop_left_early_ends_its_step(profiler: Make, tape: Any) -> None:
    with profiler() as memory:
        for number in memory.steps(range(10)):
            tape.set(200, 100)
            if number == 1:
                break
    assert memory.series.steps == (0, 1)


def test_the_profiler_does_not_hold_the_batch(profiler: Make) -> None:
    class Batch: ...

    with profiler() as memory:
        for batch in memory.steps(Batch() for _ in range(2)):
            alive = weakref.ref(batch)
            del batch
            assert alive() is None


def test_seconds_of_phases_add_up_to_the_time_between_start_and_end(profiler: Make) -> None:
    with profiler() as memory:
        for _ in memory.steps(range(3)):
            with memory.phase("work"):
                sum(range(300_000))
    series = memory.series
    total = sum(s.seconds or 0 for s in series.snapshots)
    assert 0.8 * series.duration_s < total < 1.05 * series.duration_s
    assert series.phase_seconds()["work"] > series.phase_seconds()["other"]


def test_without_times_there_are_no_seconds(profiler: Make) -> None:
    with profiler(times=False) as memory:
        memory.record_step(0)
    assert memory.snapshots[0].seconds is None
    assert memory.series.phase_seconds() == {}


def test_csv_text_and_file(profiler: Make, tape: Any, tmp_path: Path) -> None:
    with profiler() as memory:
        tape.set(250)
        memory.record_step(3, "train, full")
    text = memory.export_csv(tmp_path / "memory.csv")
    assert text.splitlines()[0] == "step,phase,used_mb,total_mb,utilization_percent"
    assert list(csv.DictReader(io.StringIO(text))) == [
        {
            "step": "3",
            "phase": "train, full",
            "used_mb": "250.0",
            "total_mb": "1000.0",
            "utilization_percent": "25.0",
        }
    ]
    assert (tmp_path / "memory.csv").read_text() == text


def test_json_is_read_back(profiler: Make, tmp_path: Path) -> None:
    with profiler(capacity="2GiB") as memory:
        memory.record_step(0, "train")
    data = json.loads(memory.export_json(tmp_path / "memory.json"))
    assert data["capacity_bytes"] == 2**31
    assert MemorySeries.load(tmp_path / "memory.json") == memory.series


@pytest.mark.parametrize("export", ["export_csv", "export_json"])
def test_a_missing_folder_is_named(profiler: Make, tmp_path: Path, export: str) -> None:
    with profiler() as memory:
        memory.record_step(0)
    with pytest.raises(UsageError, match="cannot be written: No such file") as caught:
        getattr(memory, export)(tmp_path / "missing" / "file")
    assert caught.value.hint


def nested_phases(memory: MemoryProfiler) -> None:
    with memory.step(), memory.phase("forward"), memory.phase("layer"):
        pass


def nested_steps(memory: MemoryProfiler) -> None:
    with memory.step(), memory.step():
        pass


def phase_alone(memory: MemoryProfiler) -> None:
    with memory.phase("forward"):
        pass


def record_inside(memory: MemoryProfiler) -> None:
    with memory.step():
        memory.record_step(0)


def stop_inside(memory: MemoryProfiler) -> None:
    with memory.step():
        memory.stop()


def reserved_name(memory: MemoryProfiler) -> None:
    with memory.step(), memory.phase("other"):
        pass


def same_step_twice(memory: MemoryProfiler) -> None:
    for _ in range(2):
        with memory.step(4):
            pass


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (nested_phases, "phase 'layer' begins inside phase 'forward'"),
        (nested_steps, "a step begins inside step 0"),
        (phase_alone, "phase 'forward' begins outside of a step"),
        (record_inside, r"record_step\(\) inside step 0"),
        (stop_inside, r"stop\(\) inside step 0"),
        (reserved_name, "'other' is the name of what lies outside"),
        (same_step_twice, "step 4 comes after step 4"),
        (lambda memory: memory.start(), "was started before"),
        (lambda memory: memory.record_step(-1), "step is -1"),
        (lambda memory: memory.record_step(True), "step is True"),
        (lambda memory: memory.record_step(1.5), "step is 1.5"),
        (lambda memory: memory.record_step(0, ""), "'' is no name for a phase"),
        (lambda memory: memory.record_step(0, None), "None is no name for a phase"),
    ],
)
def test_misuse_is_refused_with_a_hint(
    profiler: Make, act: Callable[[MemoryProfiler], None], message: str
) -> None:
    memory = profiler().start()
    with pytest.raises(UsageError, match=message) as caught:
        act(memory)
    assert caught.value.hint
    memory.stop()


def test_steps_that_go_back_are_refused(profiler: Make) -> None:
    with profiler() as memory:
        memory.record_step(5, "a")
        memory.record_step(5, "b")
        with pytest.raises(UsageError, match="step 4 comes after step 5"):
            memory.record_step(4)


@pytest.mark.parametrize("call", ["stop", "record_step", "step"])
def test_nothing_works_before_the_start_or_after_the_end(profiler: Make, call: str) -> None:
    def act(memory: MemoryProfiler) -> None:
        if call == "step":
            memory.step().__enter__()
        else:
            getattr(memory, call)(*([0] if call == "record_step" else []))

    memory = profiler()
    with pytest.raises(UsageError, match=r"before start\(\)") as caught:
        act(memory)
    assert caught.value.hint
    memory.start().stop()
    with pytest.raises(UsageError, match=r"after stop\(\)"):
        act(memory)


def test_nothing_recorded_is_no_peak_but_a_report(profiler: Make) -> None:
    memory = profiler()
    with pytest.raises(UsageError, match="was not started"):
        _ = memory.snapshots
    with memory:
        pass
    with pytest.raises(UsageError, match="nothing was recorded"):
        _ = memory.peak_usage_bytes
    assert memory.generate_report() == "memory: nothing was recorded\n"
    assert memory.export_csv() == "step,phase,used_mb,total_mb,utilization_percent\n"


def test_one_profiler_runs_at_a_time(profiler: Make) -> None:
    with profiler():
        with pytest.raises(UsageError, match="another memory profiler is at work on cpu"):
            profiler().start()
    profiler().start().stop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "'gpu' names no device"),
        ({"device": "mps"}, "devices of type 'mps'"),
        ({"capacity": 0}, "capacity is 0"),
        ({"capacity": "much"}, "not a number of bytes"),
        ({"counts": "allocated"}, "'allocated' is not counted on cpu"),
    ],
)
def test_bad_options_are_refused_with_a_hint(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MemfitError, match=message) as caught:
        MemoryProfiler(**({"device": "cpu"} | options))
    assert caught.value.hint


def test_cuda_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="cuda was asked for, and torch finds no CUDA device"):
        MemoryProfiler("cuda")
    assert MemoryProfiler().device == torch.device("cpu")


def test_a_device_number_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="cuda:2 was asked for, and there are 2 CUDA devices"):
        MemoryProfiler("cuda:2")


def test_the_report_names_peak_phases_and_the_first_spikes(profiler: Make, tape: Any) -> None:
    with profiler() as memory:
        for step in range(24):
            tape.set(300 if step % 2 else 100, 100)
            memory.record_step(step, "train")
    text = memory.generate_report()
    assert "300.00 MiB in step 1, train" in text
    assert "initial   100.00 MiB" in text
    assert "capacity  1000.00 MiB, 30.0% used" in text
    assert "12 rises by more than 100 MB" in text
    assert "step 19, train: +200.00 MiB" in text
    assert "step 21, train" not in text and "and 2 more" in text
    lines = [line.split()[:4] for line in text.splitlines()]
    assert ["train", "200.0", "300.0", "100.0"] in lines


def test_one_rise_was_a_plural(profiler: Make, tape: Any) -> None:
    with profiler() as memory:
        for step, highest in enumerate((100, 300, 300)):
            tape.set(highest, 100)
            memory.record_step(step)
    text = memory.generate_report()
    assert "1 rise by more than 100 MB" in text and "3 steps" in text


def test_observe_is_a_public_folder() -> None:
    assert memfit.observe.MemoryProfiler is MemoryProfiler
    assert set(memfit.observe.__all__) <= {*dir(memfit.observe), *memfit.observe._MODULES}
    for name in memfit.observe.__all__:
        assert getattr(memfit.observe, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'Profiler'"):
        memfit.observe.Profiler  # noqa: B018
