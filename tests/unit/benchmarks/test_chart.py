"""Charts of memory against time, from results that are kept."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import chart
import pytest

SYSTEMS: dict[str, dict[str, Any]] = {
    "memfit unplanned": {"peak_bytes": 100 * 2**20, "step_s": 0.010},
    "memfit unplanned again": {"step_s": 0.010},
    "memfit 16 GB with tiled_loss": {"peak_bytes": 60 * 2**20, "step_s": 0.011},
    "memfit at the peak of: blocks:0.5": {"peak_bytes": 50 * 2**20, "step_s": 0.012},
    "memfit 80%": {"peak_bytes": 80 * 2**20, "step_s": 0.0115},
    "blocks:0.5": {"peak_bytes": 50 * 2**20, "step_s": 0.013},
    "compile": {"error": "out of memory"},
    "checkpoint": {"peak_bytes": 40 * 2**20, "step_s": 0.030},
}


def test_points_have_names_that_tell_them_apart() -> None:
    points = chart.points_of(SYSTEMS)
    assert [(p.label, p.own) for p in points] == [
        ("", True),
        ("blocks compiled, budget 0.5", False),
        ("16 GB, set up", True),
        ("80%", True),
        ("nothing planned", True),
    ]
    assert points[0].peak_mb == 50 and points[0].time == pytest.approx(12)


def test_the_line_joins_what_is_not_beaten() -> None:
    front = chart.front_of(chart.points_of(SYSTEMS))
    assert [round(time, 3) for _, time in front] == [12, 11, 10]


def test_results_are_drawn_again_as_they_are_kept(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "inside-h200"
    shutil.copy(results / f"{name}.json", tmp_path)
    monkeypatch.setattr(sys, "argv", ["chart.py", str(tmp_path / f"{name}.json")])
    chart.main()
    drawn = tmp_path / f"{name}-gpt2-large-8x1024-bf16.svg"
    assert "12.5 GB, set up" in drawn.read_text()
    assert drawn.read_text().count("<svg") == (results / drawn.name).read_text().count("<svg") == 1


def test_a_workload_without_systems_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = {"machine": {"gpu": "none"}, "workloads": {"one": {"systems": {"error": "no"}}}}
    (tmp_path / "r.json").write_text(json.dumps(report))
    monkeypatch.setattr(sys, "argv", ["chart.py", str(tmp_path / "r.json")])
    chart.main()
    assert "one has no systems" in capsys.readouterr().err
