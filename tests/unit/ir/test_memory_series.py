"""Peaks, means, spikes and rows of hand-made series."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import UsageError
from memfit.ir.codec import to_data
from memfit.ir.memory_series import MB, MemorySeries, PhaseStatistics, Snapshot, Spike


def series(*rows: tuple[int, str, float], held_mb: float | None = None) -> MemorySeries:
    """A series of (step, phase, MB in use) with a capacity of 1000 MB."""
    held = None if held_mb is None else int(held_mb * MB)
    snapshots = tuple(
        Snapshot(step, phase, int(mb * MB), int(mb * MB) - MB, held) for step, phase, mb in rows
    )
    return MemorySeries("cpu", "resident", 1000 * MB, 50 * MB, snapshots, 2.0)


TWO_PHASES = series(
    (0, "forward", 100),
    (0, "backward", 300),
    (1, "forward", 110),
    (1, "backward", 280),
    (2, "forward", 400),
    (2, "backward", 620),
    (3, "forward", 390),
    (3, "backward", 610),
)


def test_the_peak_has_its_step_and_phase() -> None:
    peak = TWO_PHASES.peak
    assert (peak.step, peak.phase, peak.used_mb) == (2, "backward", 620)
    assert TWO_PHASES.peak_utilization == pytest.approx(0.62)
    assert TWO_PHASES.final_bytes == 609 * MB
    assert TWO_PHASES.steps == (0, 1, 2, 3)
    assert {s: p.used_mb for s, p in TWO_PHASES.step_peaks().items()} == {
        0: 300,
        1: 280,
        2: 620,
        3: 610,
    }


def test_of_equal_peaks_the_first_counts() -> None:
    assert series((0, "a", 5), (1, "a", 7), (2, "b", 7)).peak.step == 1


def test_mean_max_and_min_of_each_phase() -> None:
    assert TWO_PHASES.phase_statistics() == {
        "forward": PhaseStatistics(mean=250, max=400, min=100),
        "backward": PhaseStatistics(mean=452.5, max=620, min=280),
    }


def test_a_phase_is_compared_with_itself_in_the_step_before() -> None:
    assert TWO_PHASES.identify_spikes(100) == [Spike(2, 290, "forward"), Spike(2, 340, "backward")]
    assert TWO_PHASES.identify_spikes(290) == [Spike(2, 340, "backward")]
    assert TWO_PHASES.identify_spikes(340) == []


def test_a_phase_that_is_new_is_compared_with_the_peak_of_the_step_before() -> None:
    phases = series((0, "warmup", 100), (1, "full", 450), (2, "predict", 500), (3, "full", 300))
    assert phases.identify_spikes(100) == [Spike(1, 350, "full")]
    assert phases.identify_spikes(49) == [Spike(1, 350, "full"), Spike(2, 50, "predict")]


def test_nothing_comes_before_the_first_step_so_it_is_no_spike() -> None:
    assert series((0, "forward", 100), (0, "backward", 900)).identify_spikes(1) == []


@pytest.mark.parametrize("threshold", [0, -5, float("nan"), float("inf"), True, "100", None])
def test_a_threshold_out_of_range_is_refused(threshold: Any) -> None:
    with pytest.raises(UsageError, match="threshold_mb is") as caught:
        TWO_PHASES.identify_spikes(threshold)
    assert caught.value.hint


def test_rows_have_used_and_total_mb_and_percent() -> None:
    assert TWO_PHASES.rows()[5] == {
        "step": 2,
        "phase": "backward",
        "used_mb": 620.0,
        "total_mb": 1000.0,
        "utilization_percent": 62.0,
    }
    assert len(TWO_PHASES.rows()) == 8


def test_what_the_peak_did_not_need_is_a_share_of_what_was_held() -> None:
    assert TWO_PHASES.unused_share is None
    assert series((0, "a", 60), (1, "a", 75), held_mb=100).unused_share == pytest.approx(0.25)
    assert series((0, "a", 100), held_mb=100).unused_share == 0


def test_fragmentation_is_the_share_held_in_free_pieces_and_no_unused_cache() -> None:
    assert series((0, "a", 10), held_mb=100).fragmentation is None
    pieces = (Snapshot(0, "a", 10, 10, held_bytes=100, split_bytes=5),)
    pieces += (Snapshot(1, "a", 10, 10, held_bytes=100, split_bytes=20),)
    pieces += (Snapshot(2, "a", 10, 10, held_bytes=200, split_bytes=10),)
    assert [s.fragmentation for s in pieces] == [0.05, 0.2, 0.05]
    assert MemorySeries("cuda:0", "allocated", 500, 0, pieces, 1.0).fragmentation == 0.2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"capacity_bytes": 0}, "has 0 as capacity_bytes, which must be above 0"),
        ({"counts": "guessed"}, "counts 'guessed', which is none of allocated, resident, live"),
        ({"initial_bytes": -1}, "has -1 as initial_bytes"),
    ],
)
def test_a_file_with_numbers_of_no_loop_is_refused(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    path = tmp_path / "series.json"
    path.write_text(json.dumps({**TWO_PHASES.to_json(), **change}))
    with pytest.raises(UsageError, match=says) as caught:
        MemorySeries.load(path)
    assert caught.value.hint


def test_seconds_of_a_phase_are_means_over_all_steps() -> None:
    snapshots = (
        Snapshot(0, "forward", MB, MB, seconds=1.0),
        Snapshot(0, "evaluate", MB, MB, seconds=4.0),
        Snapshot(1, "forward", MB, MB, seconds=3.0),
    )
    timed = MemorySeries("cpu", "resident", MB, MB, snapshots, 8.0)
    assert timed.phase_seconds() == {"forward": 2.0, "evaluate": 2.0}
    assert TWO_PHASES.phase_seconds() == {}


def test_an_empty_series_has_no_peak_and_says_so() -> None:
    empty = series()
    with pytest.raises(UsageError, match="nothing was recorded") as caught:
        _ = empty.peak
    assert "record_step" in str(caught.value)
    assert (empty.final_bytes, empty.phase_statistics(), empty.identify_spikes(), empty.rows()) == (
        50 * MB,
        {},
        [],
        [],
    )
    assert empty.to_json()["summary"] is None


def test_json_has_a_summary_and_is_read_back(tmp_path: Path) -> None:
    data = TWO_PHASES.to_json()
    assert data["schema_version"] == 1
    assert data["summary"]["peak_bytes"] == 620 * MB
    assert data["summary"]["spikes"][0] == {"step": 2, "delta_mb": 290, "phase": "forward"}
    file = tmp_path / "memory.json"
    file.write_text(json.dumps(data))
    assert MemorySeries.load(file) == TWO_PHASES


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema_version": 2}', json.dumps({"schema_version": 1})]
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "memory.json"
    file.write_text(text)
    with pytest.raises(UsageError, match="is not a memory series"):
        MemorySeries.load(file)
    with pytest.raises(UsageError, match="is not a memory series"):
        MemorySeries.load(tmp_path / "missing.json")


def test_a_field_too_many_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    file.write_text(json.dumps({**to_data(TWO_PHASES), "colour": "red"}))
    with pytest.raises(UsageError, match="colour"):
        MemorySeries.load(file)
