"""A plan, a profile and a result made by hand."""

from __future__ import annotations

import pytest

from memfit.ir.plan import Plan, Prediction, SegmentPlan
from memfit.ir.result import BaselineResult, Decisions, Measured, Numerics, Predicted, Result

MIB = 2**20


def segment(name: str, run: int | None = None, kind: str = "Block", mib: int = 3) -> SegmentPlan:
    return SegmentPlan(
        name=name,
        module=name,
        number=0,
        visits=1,
        kind=kind,
        decision="keep" if run is None else "recompute",
        saved_bytes=mib * MIB,
        recompute_s=0.002,
        reason="kept: the budget has room" if run is None else "frees 3.00 MiB for 2.0 ms",
        run=run,
    )


@pytest.fixture
def plan() -> Plan:
    return Plan(
        fingerprint="f",
        workload={"name": "net", "model": "Net with 5 parameters", "batch": "b", "optimizer": "o"},
        torch="2.13",
        strategy="optimal",
        budget_bytes=40 * MIB,
        segments=(
            segment("stem", kind="Stem", mib=1),
            *(segment(f"blocks.{i}", run=i // 2) for i in range(4)),
            segment("blocks.4"),
            segment("blocks.5"),
        ),
        predicted=Prediction(
            peak_bytes=38 * MIB,
            reserved_bytes=38 * MIB,
            step_s=0.11,
            lower_bound_s=0.109,
            gap=0.0091,
            categories={"parameters": 20 * MIB, "batch": 0, "activations": 18 * MIB},
            where="backward blocks.5",
        ),
        baseline_peak_bytes=50 * MIB,
        baseline_step_s=0.1,
        static_bytes=25 * MIB,
        minimum_feasible_bytes=30 * MIB,
        plan_s=0.02,
        notes=("one choice",),
    )


@pytest.fixture
def result(plan: Plan) -> Result:
    return Result(
        workload=plan.workload,
        device={"type": "cuda", "name": "a GPU"},
        budget_bytes=40 * MIB,
        baseline=BaselineResult(50 * MIB, 52 * MIB, 25 * MIB, 0.1, True),
        predicted=Predicted(38 * MIB, 39 * MIB, 0.11, 0.109, 0.0091),
        measured=Measured(37 * MIB, 39 * MIB, 0.112, 0.001, 1.12, 1.004),
        decisions=Decisions(7 * MIB, 12 * MIB, 0, 7, ("recompute",)),
        numerics=Numerics(True, 0.0, 0.0),
        plan_s=0.02,
        verdict="fits",
        minimum_feasible_bytes=30 * MIB,
        notes=("one choice",),
    )
