"""Files of profiles and of fits: read as they were written, refused with a reason otherwise."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import ProfileFileError, RunFileError
from memfit.ir.codec import to_data
from memfit.ir.ended import NoResult, OutOfMemory, Stage
from memfit.ir.plan import Plan, Prediction
from memfit.ir.profile import Profile
from memfit.ir.result import BaselineResult, Decisions, Measured, Numerics, Predicted, Result
from memfit.ir.run_file import RunFile
from memfit.ir.swap import SwapStatistics, Traffic

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="module")
def profile() -> Profile:
    return Profile.load(GOLDEN / "tiny_gpt2.profile.json")


@pytest.fixture
def run(profile: Profile) -> RunFile:
    result = Result(
        workload=profile.workload,
        device={"type": "cpu", "name": "a CPU"},
        budget_bytes=40,
        baseline=BaselineResult(50, 52, 25, 0.1, True),
        predicted=Predicted(38, 39, 0.11, 0.109, 0.0091, 1.1),
        measured=Measured(37, 39, 0.112, 0.001, 1.12, 1.004),
        decisions=Decisions(7, 12, 0, 7, ("recompute",)),
        numerics=Numerics(False, 0.0, 0.5, {"planned": 0.1, "unplanned": 0.2}),
        plan_s=0.02,
        verdict="fits",
        minimum_feasible_bytes=30,
        swap=SwapStatistics(2, 4, 4, 0, 0, Traffic(100, 4, 0.1), Traffic(100, 4, 0.1), 60, 50),
    )
    plan = Plan(
        fingerprint="f",
        workload=profile.workload,
        torch="2.13",
        strategy="optimal",
        budget_bytes=40,
        segments=(),
        variants=(),
        predicted=Prediction(38, 38, 0.11, 0.109, 0.0091, {"parameters": 38}, "backward"),
        baseline_peak_bytes=50,
        baseline_step_s=0.1,
        static_bytes=25,
        minimum_feasible_bytes=30,
    )
    plain = replace(profile, setup=())
    return RunFile(result, plan, profile, plain, "memfit fit tiny -o run.json", "0.1.0")


def test_a_run_is_read_as_it_was_written(run: RunFile, tmp_path: Path) -> None:
    run.save(tmp_path / "run.json")
    assert RunFile.load(tmp_path / "run.json") == run


def test_a_run_may_be_packed(run: RunFile, tmp_path: Path) -> None:
    run.save(tmp_path / "run.json")
    packed = tmp_path / "run.json.gz"
    packed.write_bytes(gzip.compress((tmp_path / "run.json").read_bytes()))
    assert RunFile.load(packed) == run
    packed.write_bytes(packed.read_bytes()[:200])
    with pytest.raises(RunFileError, match="cannot read the result"):
        RunFile.load(packed)


def test_a_run_without_plan_and_profile_is_a_result(run: RunFile, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(json.dumps(run.result.to_json()))
    assert RunFile.load(tmp_path / "old.json") == RunFile(run.result)


def test_a_fit_without_a_result_is_read_as_it_was_written(profile: Profile, tmp_path: Path) -> None:
    memory = OutOfMemory((Stage("warming up", 0.5),), "backward", {"parameters": 3}, ("3 B",), 9)
    workload, device = profile.workload, vars(profile.device)
    for refused in (
        NoResult("infeasible", "no", "more", 1, 2, 3, {"fixed": 3}, workload, device),
        NoResult("out of memory", "none left", None, 4, memory=memory),
    ):
        run = RunFile(None, None, profile, None, "memfit fit", "0.1.0", refused)
        run.save(tmp_path / "run.json")
        assert RunFile.load(tmp_path / "run.json") == run


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting"),
        ("[]", "schema_version"),
        ('{"schema_version": 99}', "schema_version 99, not 1: a newer memfit"),
        ('{"schema_version": 0}', "schema_version 0, not 1"),
        ('{"schema_version": true}', "schema_version True, not 1"),
        ('{"schema_version": 1}', "has no 'workload'"),
        ('{"schema_version": 1, "verdict": "infeasible"}', "NoResult has no 'error'"),
    ],
)
def test_what_is_no_run_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunFileError, match="not the result of a fit") as caught:
        RunFile.load(tmp_path / "run.json")
    assert said in caught.value.message and "memfit fit" in (caught.value.hint or "")


def _cut(data: Any, *path: str, to: int) -> None:
    for name in path[:-1]:
        data = data[name]
    data[path[-1]] = data[path[-1]][:to]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["plan"].update(schema_version=1), "its plan has schema_version 1"),
        (lambda d: d["profile"].update(schema_version=0), "its profile has schema_version 0"),
        (lambda d: d["plain"].update(schema_version=2), "its plain profile has schema_version 2"),
        (lambda d: d["plan"].pop("schema_version"), "its plan has schema_version None"),
        (lambda d: d["plan"].update(split=0), "its plan cannot be run: split is 0"),
        (lambda d: d["plan"].update(budget_bytes=-1), "budget_bytes is -1, below 0"),
        (lambda d: d.update(profile=[]), "its profile has schema_version None"),
        (lambda d: _cut(d, "profile", "graph", "blocks", to=3), "and holds 3"),
        (lambda d: _cut(d, "profile", "graph", "calls", to=1), "and holds 1"),
        (lambda d: _cut(d, "plain", "call_times", to=1), "its plain profile times 1 of"),
        (lambda d: d["measured"].update(step_s=float("nan")), "nan as measured.step_s"),
        (lambda d: d["measured"].update(time_ratio=0), "0.0 as measured.time_ratio"),
        (lambda d: d["predicted"].update(time_ratio=-1.0), "-1.0 as predicted.time_ratio"),
        (lambda d: d["baseline"].update(peak_bytes=0), "0 as baseline.peak_bytes, which must be"),
        (lambda d: d["predicted"].update(gap=float("inf")), "inf as predicted.gap"),
        (lambda d: d["profile"].update(step_s=0), "its profile has 0.0 as step_s"),
        (lambda d: d["profile"]["call_times"][0].update(forward_s=-1), "call_times[0].forward_s"),
        (lambda d: d["profile"].update(accumulate=0), "0 as accumulate"),
        (lambda d: d["profile"]["graph"].update(length=1), "whose parts end at"),
        (lambda d: d["profile"]["graph"]["blocks"][0].update(bytes=-1), "-1 as block 0, bytes"),
    ],
)
def test_a_run_whose_parts_were_changed_is_refused(
    run: RunFile, change: Callable[[Any], None], said: str, tmp_path: Path
) -> None:
    data = run.to_json()
    change(data)
    (tmp_path / "run.json").write_text(json.dumps(data))
    with pytest.raises(RunFileError, match="not the result of a fit") as caught:
        RunFile.load(tmp_path / "run.json")
    assert said in caught.value.message and caught.value.hint


def test_a_graph_without_its_nodes_is_refused(tmp_path: Path) -> None:
    """The plan's tensors were looked up in it: a KeyError."""
    text = gzip.decompress((GOLDEN / "gpt2_large_set_up.profile.json.gz").read_bytes())
    data = json.loads(text)
    data["graphs"][0]["nodes"] = []
    (tmp_path / "profile.json").write_text(json.dumps(data))
    with pytest.raises(ProfileFileError, match=r"is of no step: it names nodes up to .* has 0"):
        Profile.load(tmp_path / "profile.json")


def test_numbers_that_may_be_unlimited_are_read(run: RunFile, tmp_path: Path) -> None:
    assert run.result is not None
    numerics = replace(run.result.numerics, grad_max_rel_diff=float("inf"))
    apart = replace(run, result=replace(run.result, numerics=numerics))
    apart.save(tmp_path / "run.json")
    assert RunFile.load(tmp_path / "run.json") == apart


def test_a_missing_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="cannot read") as caught:
        RunFile.load(tmp_path / "no.json")
    assert caught.value.exit_code == 2


def test_a_profile_may_be_packed(profile: Profile, tmp_path: Path) -> None:
    packed = tmp_path / "profile.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(to_data(profile)).encode()))
    assert Profile.load(packed) == profile


def test_a_profile_that_is_cut_off_is_refused(profile: Profile, tmp_path: Path) -> None:
    text = json.dumps(to_data(profile))
    (tmp_path / "cut.json").write_text(text[: len(text) // 2])
    with pytest.raises(ProfileFileError, match="not a whole memfit profile"):
        Profile.load(tmp_path / "cut.json")
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(text.encode())[:500])
    with pytest.raises(ProfileFileError, match="cannot read the profile"):
        Profile.load(tmp_path / "cut.json.gz")


def test_a_profile_of_nothing_is_refused(profile: Profile, tmp_path: Path) -> None:
    empty = replace(profile, graph=replace(profile.graph, calls=()), call_times=())
    (tmp_path / "empty.json").write_text(json.dumps(to_data(empty)))
    with pytest.raises(ProfileFileError, match="is empty: 0 segments"):
        Profile.load(tmp_path / "empty.json")


def test_a_plan_is_no_profile(run: RunFile, tmp_path: Path) -> None:
    assert run.plan is not None
    run.plan.save(tmp_path / "plan.json")
    with pytest.raises(ProfileFileError, match="profile"):
        Profile.load(tmp_path / "plan.json")
