"""Plans that were changed by hand: what no model could run is found, and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfit import api
from memfit.errors import PlanFileError
from memfit.ir import plan_check
from memfit.ir.codec import to_data
from memfit.ir.plan import Plan, Prediction, SegmentPlan, VariantPlan
from memfit.ir.plan_check import fault_in
from memfit.planning.techniques import AVAILABLE

Data = dict[str, Any]


def _segment(index: int, **more: Any) -> SegmentPlan:
    about = dict(kind="Block", decision="partial", saved_bytes=100, recomputed_bytes=10)
    about |= dict(name=f"layers.{index}", module=f"layers.{index}", number=0, visits=1)
    return SegmentPlan(**{**about, "recompute_s": 0.25, "reason": "why", **more})


def _variant(graph: str, unplanned: bool, offloaded: tuple[str, ...] = ()) -> VariantPlan:
    return VariantPlan(graph, "Block", ("a", "b"), unplanned, 3, 3, (), offloaded)


@pytest.fixture
def plan() -> Plan:
    return Plan(
        fingerprint="0123",
        workload={"name": "x"},
        torch="2.13.0",
        strategy="optimal",
        budget_bytes=12345,
        segments=(
            _segment(0, decision="recompute", run=0),
            _segment(1, decision="recompute", run=0),
            _segment(2, variant=1, offloaded_bytes=50, release=3, prefetch=4),
            _segment(3, variant=0, decision="keep"),
        ),
        variants=(_variant("g-1", True), _variant("g-1", False, ("b",))),
        predicted=Prediction(12000, 12100, 1.5, 1.25, 0.1, {"activations": 12000}, "layers.0"),
        baseline_peak_bytes=20000,
        baseline_step_s=1.0,
        static_bytes=4000,
        minimum_feasible_bytes=9000,
        executor="graph",
        techniques=("recompute", "offload"),
        host_bytes=50,
    )


def _in(part: str, number: int, **values: Any) -> Callable[[Data], None]:
    return lambda data: data[part][number].update(values)


def _of(**values: Any) -> Callable[[Data], None]:
    return lambda data: data.update(values)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            _in("segments", 3, variant=77),
            r"segments\[3\] .layers.3.*is 77, and there are 2 variants",
        ),
        (_in("segments", 3, variant=-1), "variant is -1"),
        (_of(variants=[]), "there are 0 variants"),
        (_in("variants", 0, graph="abc"), "'g-1', of which no variant is the unplanned one"),
        (_in("variants", 1, graph="abc"), "'abc', of which no variant is the unplanned one"),
        (_in("variants", 1, offloaded=["nonsense"]), "moves 'nonsense' to the host"),
        (_of(split=0), "split is 0, not 1 or more"),
        (_of(split=-2), "split is -2"),
        (_of(model_calls=0), "model_calls is 0"),
        (_of(budget_bytes=0), "budget_bytes is 0"),
        (_of(host_bytes=-1), "host_bytes is -1, below 0"),
        (_of(tile_bytes=0), "tile_bytes is 0"),
        (_of(baseline_step_s=0), "baseline_step_s is 0.0"),
        (_of(baseline_step_s=float("nan")), "baseline_step_s is nan"),
        (_of(executor="jit"), "'jit', which is none of graph, inductor, module"),
        (_of(executor="module"), "the executor 'module' has none"),
        (_of(counts="all"), "counts has 'all'"),
        (_of(techniques=["magic"]), "techniques has 'magic'"),
        (_in("segments", 0, decision="drop"), "decision has 'drop'"),
        (_in("segments", 0, saved_bytes=-1), "saved_bytes is -1, below 0"),
        (_in("segments", 2, release=9), "release is 9, not between 3 and 4"),
        (_in("segments", 2, release=1), "release is 1, not between 3 and 4"),
        (_in("segments", 2, prefetch=-3), "prefetch is -3, not between 0 and 4"),
        (_in("segments", 2, prefetch=None), "only one of release and prefetch"),
        (_in("segments", 3, run=0), "run 0 has gaps between segments 0 and 3"),
        (lambda data: data["segments"].pop(1), "it has 3 segments and was made with 4"),
        (lambda data: data["segments"].reverse(), "not in their order"),
        (_in("segments", 1, module="layers.9"), "not those it was made with"),
    ],
)
def test_an_edited_file_is_refused(
    plan: Plan, tmp_path: Path, edit: Callable[[Data], None], says: str
) -> None:
    """These gave IndexError, KeyError, ZeroDivisionError, or were taken without a word."""
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(PlanFileError, match=says) as refusal:
        Plan.load(path)
    assert refusal.value.hint and refusal.value.exit_code == 2


def test_a_call_that_is_there_twice_or_is_none_of_its_module(plan: Plan) -> None:
    first, *rest = plan.segments
    twice = replace(plan, segments=(first, first, *rest[1:]), route_key="")
    assert fault_in(twice) == "call 0 of 'layers.0' is there 2 times"
    third = replace(plan, segments=(replace(first, number=2), *rest), route_key="")
    assert str(fault_in(third)).endswith("(layers.0) is call 2 of 1")


def test_files_of_before_have_no_key_and_are_read(plan: Plan, tmp_path: Path) -> None:
    data = to_data(plan)
    del data["route_key"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    assert Plan.load(path) == plan


def test_plans_made_of_a_plan_have_no_fault(plan: Plan) -> None:
    assert fault_in(plan) is None
    assert fault_in(plan.unplanned()) is None
    assert fault_in(plan.resident()) is None


def test_the_words_are_those_of_the_planner() -> None:
    assert set(plan_check.TECHNIQUES) == set(AVAILABLE)
    assert set(plan_check.EXECUTORS) == set(api.EXECUTORS)
