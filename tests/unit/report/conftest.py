"""A plan and a result made by hand, and a report of a step that was profiled on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from memfit.ir.ended import NoResult, OutOfMemory, Stage
from memfit.ir.plan import ActivationPlan, Plan, Prediction, SegmentPlan, VariantPlan
from memfit.ir.profile import Profile
from memfit.ir.result import BaselineResult, Decisions, Measured, Numerics, Predicted, Result
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.replay import replay, replay_plan
from memfit.planning.simulate import Simulator
from memfit.report.run_report import EndedReport, RunReport
from memfit.report.sweep import SweepRow

MIB = 2**20
H200 = Path(__file__).parents[2] / "golden" / "gpt2_large_set_up.profile.json.gz"
GB = 10**9


def segment(name: str, run: int | None = None, kind: str = "Block", mib: int = 3) -> SegmentPlan:
    return SegmentPlan(
        name=name,
        module=name,
        number=0,
        visits=1,
        kind=kind,
        decision="keep" if run is None else "recompute",
        saved_bytes=mib * MIB,
        recomputed_bytes=0 if run is None else mib * MIB,
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
        variants=(),
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


def tensor(name: str, decision: str, created: int, read: int) -> ActivationPlan:
    """One whose bytes and seconds tell it apart."""
    return ActivationPlan(name, decision, 1000 + read, read / 100, created, read, f"why {name}")


def variant(*recomputed: str, offloaded: tuple[str, ...] = ()) -> VariantPlan:
    """Five forward and four backward operators; of x, a, b and c these are not kept."""
    gone = {**dict.fromkeys(recomputed, "recompute"), **dict.fromkeys(offloaded, "offload")}
    places = {"x": (-1, 3), "a": (0, 2), "b": (1, 1), "c": (2, 0)}
    return VariantPlan(
        graph="g",
        kind="Block",
        saved=tuple(name for name in places if name not in recomputed),
        unplanned=not gone,
        offloaded=offloaded,
        forward_ranks=5,
        backward_ranks=4,
        activations=tuple(
            tensor(name, gone.get(name, "keep"), *ranks) for name, ranks in places.items()
        ),
    )


@pytest.fixture
def mixed(plan: Plan) -> Plan:
    """A stem kept as a module, two blocks in part, one kept, two recomputed as a run, a head."""

    def partial(name: str) -> SegmentPlan:
        return replace(segment(name), decision="partial", recomputed_bytes=2 * MIB, variant=1)

    stem = replace(
        segment("stem", kind="Stem", mib=1),
        uncaptured="it branches on data",
        activations=(tensor("conv_0", "keep", 17, 90),),
    )
    head = replace(
        segment("head", kind="Linear", mib=1),
        uncaptured="a single layer: nothing inside to plan",
        activations=(tensor("mm_0", "keep", 60, -1),),
    )
    return replace(
        plan,
        executor="graph",
        segments=(
            stem,
            partial("blocks.0"),
            partial("blocks.1"),
            replace(segment("blocks.2"), variant=0),
            replace(segment("blocks.3", run=0), variant=0),
            replace(segment("blocks.4", run=0), variant=0),
            head,
        ),
        variants=(variant(), variant("b", "c")),
    )


@pytest.fixture
def moving(mixed: Plan) -> Plan:
    """A stem kept, two blocks offloaded, one in part offloaded, a run of two, a head offloaded."""

    def away(name: str, index: int, ahead: int) -> SegmentPlan:
        return replace(
            segment(name),
            decision="offload",
            offloaded_bytes=2 * MIB,
            release=index + 1,
            prefetch=index + ahead,
            reason=f"sends 2.00 MiB to the host, back from call {index + ahead} on",
            variant=2,
        )

    partial = replace(
        away("blocks.2", 3, 1), decision="partial", recomputed_bytes=MIB, offloaded_bytes=MIB
    )
    head = replace(
        away("head", 6, 0),
        kind="Linear",
        saved_bytes=3 * MIB,
        variant=None,
        activations=(tensor("mm_0", "offload", 60, 61),),
    )
    return replace(
        mixed,
        segments=(
            mixed.segments[0],
            away("blocks.0", 1, 1),
            away("blocks.1", 2, 2),
            replace(partial, variant=3),
            *mixed.segments[4:6],
            head,
        ),
        variants=(
            *mixed.variants,
            variant(offloaded=("a", "b")),
            variant("c", offloaded=("a",)),
        ),
        predicted=replace(mixed.predicted, copy_s=0.004, stall_s=0.001),
        techniques=("recompute", "offload"),
        host_bytes=8 * MIB,
    )


@pytest.fixture
def result(plan: Plan) -> Result:
    return Result(
        workload=plan.workload,
        device={"type": "cuda", "name": "a GPU"},
        budget_bytes=40 * MIB,
        baseline=BaselineResult(50 * MIB, 52 * MIB, 25 * MIB, 0.1, True),
        predicted=Predicted(38 * MIB, 39 * MIB, 0.11, 0.109, 0.0091, 1.1),
        measured=Measured(37 * MIB, 39 * MIB, 0.112, 0.001, 1.12, 1.004),
        decisions=Decisions(7 * MIB, 12 * MIB, 0, 7, ("recompute",)),
        numerics=Numerics(True, 0.0, 0.0, agree=True),
        plan_s=0.02,
        verdict="fits",
        minimum_feasible_bytes=30 * MIB,
        notes=("one choice",),
    )


@pytest.fixture(scope="session")
def planned() -> RunReport:
    """GPT-2-large on an H200, planned for 16 GB by `ratio`, with a curve; it was not run."""
    profile = Profile.load(H200)
    plan = make_plan(profile, Goal(budget_bytes=16 * GB, strategy="ratio"))
    simulator = Simulator(profile, 0, ("recompute", "offload"))
    none = make_plan(profile, Goal(budget_bytes=26 * GB, strategy="none"))
    swap = make_plan(profile, Goal(budget_bytes=16 * GB, strategy="swap", techniques=("offload",)))
    curve = (
        SweepRow(16 * GB, {"ratio": plan, "swap": swap, "none": None}),
        SweepRow(26 * GB, {"ratio": none, "swap": swap, "none": none}),
    )
    return RunReport(
        profile=profile,
        plan=plan,
        before=replay(simulator, []),
        after=replay_plan(simulator, plan),
        command="memfit report --profile 'a <b> & c.json'",
        made="2026-11-16 12:00 +0000",
        memfit="0.1.0",
        curve=curve,
    )


@pytest.fixture(scope="session")
def ended() -> EndedReport:
    """A fit that found no memory while it was profiled."""
    memory = OutOfMemory(
        (Stage("finding segments", 0.1), Stage("warming up", 0.5)),
        "backward at <b>",
        {"parameters": 2 * 2**30, "gradients": 0, "activations": 2**30},
        ("1.00 GiB a <tensor>",),
        8 * 2**30,
    )
    error = f"out of memory. {memory.words}"
    refused = NoResult("out of memory", error, "a smaller one", 4, memory=memory)
    return EndedReport(refused, "memfit report run.json", "now", "0.1.0", "memfit fit 'a <b>'")


@pytest.fixture(scope="session")
def run(planned: RunReport) -> RunReport:
    """The same with what a run of it might have measured."""
    plan, baseline = planned.plan, planned.profile.baseline
    assert baseline is not None and plan.budget_bytes is not None
    expected = plan.predicted
    peak_bytes = round(expected.peak_bytes * 1.001)
    result = Result(
        workload=plan.workload,
        device=vars(planned.profile.device),
        budget_bytes=plan.budget_bytes,
        baseline=BaselineResult(
            baseline.peak_bytes, baseline.peak_reserved_bytes, plan.static_bytes, 0.175, True
        ),
        predicted=Predicted(
            expected.peak_bytes,
            expected.reserved_bytes,
            expected.step_s,
            expected.lower_bound_s,
            expected.gap,
            expected.step_s / plan.baseline_step_s,
        ),
        measured=Measured(peak_bytes, expected.reserved_bytes, 0.22, 0.002, 1.257, 1.001),
        decisions=Decisions(1, 2, 0, len(plan.segments), ("recompute",)),
        numerics=Numerics(True, 0.0, 0.0, agree=True),
        plan_s=0.1,
        verdict="fits",
        minimum_feasible_bytes=plan.minimum_feasible_bytes,
    )
    return replace(planned, result=result, run_command="memfit fit transformers:gpt2-large")
