"""Files of benchmarks with numbers of no step are refused, not divided by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import UsageError
from memfit.ir.bench import OK, BenchReport, ByRounds, Cell, Reference


def saved(path: Path, **reference: Any) -> Path:
    """A report of one cell, some numbers of whose reference are others."""
    rounds = ByRounds(1.0, 0.99, 1.01)
    base = Reference("eager", 1000, 1200, 0, 0.1, 0.001, 0.1, rounds)
    cell = Cell("net@8", "compile", OK, reference=base, peak_bytes=500, step_s=0.05)
    data = BenchReport({"device": "cpu"}, {}, cells=(cell,)).to_json()
    data["cells"][0]["reference"].update(reference)
    path.write_text(json.dumps(data))
    return path


def test_a_whole_report_is_read(tmp_path: Path) -> None:
    assert BenchReport.load(saved(tmp_path / "bench.json")).cells[0].ratio == 0.5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"step_s": 0}, r"net@8 \| compile: reference.step_s, which must be above 0"),
        ({"again_s": float("nan")}, "has nan as net@8"),
        ({"peak_bytes": -1}, "reference.peak_bytes"),
        ({"again_by_rounds": {"ratio": 0, "low": 0, "high": 0}}, "again_by_rounds.ratio"),
    ],
)
def test_numbers_of_no_step_are_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        BenchReport.load(saved(tmp_path / "bench.json", **change))
    assert caught.value.hint
