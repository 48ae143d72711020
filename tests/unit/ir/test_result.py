"""A result's errors of prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.ir.result import (
    BaselineResult,
    Decisions,
    Measured,
    Numerics,
    Predicted,
    Result,
)
from memfit.ir.timeline import Point, Timeline


def test_errors_are_relative_to_what_was_measured() -> None:
    result = Result(
        workload={},
        device={},
        budget_bytes=100,
        baseline=BaselineResult(200, 200, 50, 1.0, True),
        predicted=Predicted(99, 99, step_s=1.1, lower_bound_s=1.0, gap=0.0, time_ratio=2.2),
        measured=Measured(90, 90, 1.0, 0.01),
        decisions=Decisions(1, 2, 0, 3, ("recompute",)),
        numerics=Numerics(True, 0.0, 0.0, agree=True),
        plan_s=0.1,
        verdict="fits",
        minimum_feasible_bytes=80,
    )
    assert result.peak_error == pytest.approx(0.1)
    assert result.time_error == pytest.approx(0.1)
    beside = replace(result, measured=Measured(90, 90, 1.0, 0.01, time_ratio=2.0))
    assert beside.time_error == pytest.approx(0.1), "a slower clock is no error of the plan"
    assert result.to_json()["decisions"]["techniques"] == ["recompute"]


def test_a_timeline_names_every_category_of_its_peak() -> None:
    peak = Point(3, "backward", {"parameters": 5, "activations": 7})
    timeline = Timeline((Point(0, "forward", {"parameters": 5}), peak), peak)
    assert timeline.peak_bytes == 12
    assert timeline.peak_categories["temporaries"] == 0
    assert sum(timeline.peak_categories.values()) == 12
