"""Plans on disk: what is read is what was written, and what is not whole is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import PlanFileError
from memfit.ir.codec import to_data
from memfit.ir.plan import KEEP, OFFLOAD, RECOMPUTE, Plan, Prediction, SegmentPlan


def _segment(index: int, run: int | None) -> SegmentPlan:
    return SegmentPlan(
        name=f"layers.{index}",
        module=f"layers.{index}",
        number=0,
        visits=1,
        kind="Block",
        decision=KEEP if run is None else RECOMPUTE,
        saved_bytes=100 + index,
        recomputed_bytes=0 if run is None else 100 + index,
        recompute_s=0.25,
        reason="why",
        run=run,
        mutated_buffers=("count",) if index == 0 else (),
    )


@pytest.fixture
def plan() -> Plan:
    runs = [0, 0, None, 1]
    return Plan(
        fingerprint="0123",
        workload={"name": "x", "batch": "float32[2, 3]"},
        torch="2.13.0",
        strategy="optimal",
        budget_bytes=12345,
        segments=tuple(_segment(i, run) for i, run in enumerate(runs)),
        variants=(),
        predicted=Prediction(
            peak_bytes=12000,
            reserved_bytes=12100,
            step_s=1.5,
            lower_bound_s=1.25,
            gap=0.1,
            categories={"activations": 12000},
            where="backward layers.0",
        ),
        baseline_peak_bytes=20000,
        baseline_step_s=1.0,
        static_bytes=4000,
        minimum_feasible_bytes=9000,
        notes=("a note",),
    )


def test_what_is_loaded_is_what_was_saved(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert Plan.load(str(path)) == plan
    assert json.loads(path.read_text())["schema_version"] == 3


def test_runs_route_and_bytes(plan: Plan) -> None:
    assert plan.runs == [(0, 1), (3, 3)]
    assert plan.route[2] == ("layers.2", 0, 1)
    assert plan.recomputed_bytes == 100 + 101 + 103
    assert plan.kept_bytes == 102


def test_calls_at_work_are_those_of_runs_moves_and_their_points(plan: Plan) -> None:
    assert plan.calls_at_work == {0, 1, 3}
    assert plan.unplanned().calls_at_work == frozenset()
    segments = [_segment(i, None) for i in range(6)]
    segments[1] = replace(segments[1], decision=OFFLOAD, release=2, prefetch=3)
    assert replace(plan, segments=tuple(segments)).calls_at_work == {1, 2, 3, 5}
    segments[1] = replace(segments[1], release=6, prefetch=6)
    moving = replace(plan, segments=tuple(segments))
    assert moving.calls_at_work == {1, 5}, "6 is the end of the forward, which is no call"
    assert moving.resident().calls_at_work == frozenset()


def _cut(data: dict[str, Any]) -> str:
    text = json.dumps(data, indent=1)
    return text[: len(text) // 2]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_cut, "not a whole memfit plan"),
        (lambda data: "", "not a whole memfit plan"),
        (lambda data: "[1, 2]", "not a JSON object"),
        (lambda data: json.dumps({**data, "schema_version": 2}), "schema_version is 2"),
        (lambda data: json.dumps({**data, "schema_version": None}), "schema_version is None"),
        (lambda data: json.dumps({**data, "colour": 1}), "unknown field 'colour'"),
        (lambda data: json.dumps({**data, "segments": "all"}), "Plan.segments should be a list"),
        (
            lambda data: json.dumps({k: v for k, v in data.items() if k != "segments"}),
            "has no 'segments'",
        ),
        (lambda data: json.dumps({**data, "segments": [{}]}), "has no 'name'"),
    ],
)
def test_damaged_files_are_refused(
    plan: Plan, tmp_path: Path, damage: Callable[[dict[str, Any]], str], says: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(damage(to_data(plan)))
    with pytest.raises(PlanFileError, match=says) as refusal:
        Plan.load(path)
    assert refusal.value.hint
    assert refusal.value.exit_code == 2
    assert str(path) in str(refusal.value)


def test_every_truncation_is_refused(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    text = json.dumps(to_data(plan))
    for length in range(0, len(text), 37):
        path.write_text(text[:length])
        with pytest.raises(PlanFileError):
            Plan.load(path)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="cannot read the plan"):
        Plan.load(tmp_path / "missing.json")
    with pytest.raises(PlanFileError, match="cannot read the plan"):
        Plan.load(tmp_path)
    binary = tmp_path / "plan.bin"
    binary.write_bytes(b"\xff\xfe\x00\x80\x81")
    with pytest.raises(PlanFileError, match="cannot read the plan"):
        Plan.load(binary)
