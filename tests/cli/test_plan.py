"""`memfit plan` and its sweep."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest

from memfit.cli.goal import GoalOptions
from memfit.cli.sweep import spread_budgets, sweep
from memfit.ir.plan import SCHEMA_VERSION, Plan
from memfit.report.decisions import DECISION_COLUMNS

NO_GOAL = GoalOptions(None, None, None, None, None, None, [], [])


def test_plan_lists_segments_peak_and_time(memfit, tiny):
    result = memfit("plan", *tiny, "--budget", "90%")
    assert result.exit_code == 0, result.stderr
    for word in ("TransformerEncoderLayer", "keep: a single layer", "segments recomputed whole"):
        assert word in result.stdout
    for word in ("predicted peak", "is the smallest possible budget", "(gap "):
        assert word in result.stdout
    assert result.stdout.splitlines()[-1].endswith("--budget 90%")


def test_plan_json_is_the_plan_and_categories_sum_to_the_peak(memfit, tiny, plan_file):
    result = memfit("plan", *tiny, "--budget", "90%", "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["schema_version"] == SCHEMA_VERSION
    assert data.keys() == json.loads(plan_file.read_text()).keys()
    assert sum(data["predicted"]["categories"].values()) == data["predicted"]["peak_bytes"]


def test_like_segments_share_a_row_unless_all_are_asked_for(memfit, tiny):
    options = ["--strategy", "none", "--set", "n_layer=3"]
    target = [word for word in tiny if word != "n_layer=2"]
    target.pop(target.index("--set"))
    joined = memfit("plan", *target, *options)
    assert "layers.0 .. 2 (3)" in joined.stdout
    listed = memfit("plan", *target, *options, "--all")
    assert "layers.1 " in listed.stdout and ".." not in listed.stdout


def test_after_writing_a_plan_the_next_command_runs_it(memfit, tiny, tmp_path):
    path = tmp_path / "plan.json"
    result = memfit("plan", *tiny, "--budget", "90%", "-o", path)
    assert result.stdout.splitlines()[-1].endswith(f"--plan {path}")


@pytest.mark.parametrize("executor", ["module", "graph"])
def test_decisions_are_written_as_csv_or_with_reasons_as_json(memfit, tiny, tmp_path, executor):
    path, plain = tmp_path / "plan.json", tmp_path / "decisions.csv"
    words = ["--budget", "90%", "--executor", executor, "-o", path]
    result = memfit("plan", *tiny, *words, "--decisions", plain)
    assert result.exit_code == 0, result.stderr
    rows = list(csv.DictReader(plain.open()))
    assert tuple(rows[0]) == DECISION_COLUMNS
    again = sum(row["decision"] == "RECOMPUTE" for row in rows)
    assert 0 < again < len(rows)
    assert f"{again} of {len(rows)} tensors" in " ".join(result.stdout.split())
    plan = Plan.load(path)
    recomputed = {s.name for s in plan.segments if s.decision != "keep"}
    segments = {r["activation_name"].split("/")[0] for r in rows if r["decision"] == "RECOMPUTE"}
    assert segments == recomputed
    explained = tmp_path / "decisions.json"
    assert memfit("plan", *tiny, *words, "--decisions", explained).exit_code == 0
    data = json.loads(explained.read_text())
    assert data["schema_version"] == 1 and len(data["decisions"]) == len(rows)
    assert all(row["reason"] for row in data["decisions"])


def test_decisions_are_not_lost_in_a_missing_folder(memfit, tiny, tmp_path):
    result = memfit("plan", *tiny, "--budget", "90%", "--decisions", tmp_path / "no" / "d.csv")
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr


def test_options_are_carried_into_the_plan_and_the_next_command(memfit, tiny):
    how = ["--segments", "layers.*", "--executor", "module", "--min-tensor-bytes", "100KB"]
    result = memfit("plan", *tiny, "--budget", "90%", *how)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1].endswith(
        "--budget 90% --segments 'layers.*' --executor module --min-tensor-bytes 100KB"
    )
    data = json.loads(memfit("plan", *tiny, "--budget", "90%", *how, "--json").stdout)
    assert data["executor"] == "module"
    swept = memfit("plan", *tiny, "--sweep", *how)
    assert swept.stdout.splitlines()[-1].endswith("--executor module --min-tensor-bytes 100KB")


def test_goal_hands_its_options_to_the_library():
    goal = replace(NO_GOAL, executor="graph", min_tensor_bytes="100KB")
    options = goal.plan_options()
    assert (options["executor"], options["min_tensor_bytes"]) == ("graph", 100_000)
    assert NO_GOAL.plan_options()["min_tensor_bytes"] == 0
    assert NO_GOAL.words() == []
    assert goal.words() == ["--executor", "graph", "--min-tensor-bytes", "100KB"]


def test_sweep_is_ascending_in_budget_and_never_slower(memfit, tiny):
    result = memfit("plan", *tiny, "--sweep", "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    rows = data["budgets"]
    budgets = [row["budget_bytes"] for row in rows]
    times = [row["predicted"]["step_s"] for row in rows]
    assert len(budgets) == 10 and budgets == sorted(budgets)
    assert times == sorted(times, reverse=True)
    assert budgets[0] == data["minimum_feasible_bytes"]
    assert all(row["predicted"]["peak_bytes"] <= row["budget_bytes"] for row in rows)
    assert rows[-1]["num_recomputed"] == 0


def test_a_sweep_of_what_is_tried_for_one_budget_is_refused_before_anything_is_measured(
    memfit, monkeypatch
):
    monkeypatch.setattr("memfit.api.profile", None)  # nobody is to call it
    result = memfit("plan", "encoder", "--sweep", "--allow", "+tiled_loss")
    assert result.exit_code == 2
    assert "tiled_loss is tried for one budget" in result.stderr and "hint:" in result.stderr


def test_sweep_table_and_comparison_of_strategies(memfit, tiny):
    result = memfit("plan", *tiny, "--sweep", "--strategy", "optimal,ratio,none")
    assert result.exit_code == 0, result.stderr
    assert "optimal" in result.stdout and "ratio" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if "%" in line]
    assert len(rows) == 10
    assert rows[0][-1] == "-" and rows[-1][-1] == "1.000x"
    single = memfit("plan", *tiny, "--sweep")
    assert "recomputed" in single.stdout and "predicted, not run" in single.stdout


def test_a_worse_plan_for_a_larger_budget_is_replaced_by_the_smaller_ones(
    monkeypatch: pytest.MonkeyPatch, plan_file
):
    saved = Plan.load(plan_file)
    seconds = iter([3.0, 2.0, 2.5, 1.0])

    def plan(profile, budget, **options):
        return replace(saved, predicted=replace(saved.predicted, step_s=next(seconds)))

    class Device:
        type = "cpu"
        capacity_bytes = 100

    class Profile:
        device = Device()

    monkeypatch.setattr("memfit.cli.sweep.plan", plan)
    rows = sweep(Profile(), [1, 2, 3, 4], ["optimal"], NO_GOAL, lambda text: None)
    assert [row.plans["optimal"].predicted.step_s for row in rows] == [3.0, 2.0, 2.0, 1.0]


def test_budgets_are_spread_from_the_minimum_to_the_unplanned_step():
    assert spread_budgets(100, 190) == list(range(100, 191, 10))
    assert spread_budgets(100, 100) == [100]


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "there is no budget to plan for"),
        (["--sweep", "--budget", "1GiB"], "--sweep goes over many budgets"),
        (["--sweep", "--decisions", "d.csv"], "--decisions is for one plan"),
        (["--sweep", "-o", "plan.json"], "--sweep goes over many budgets"),
        (["--budget", "1GiB", "--utilization", "0.5"], "exclude each other"),
        (["--budget", "1GiB", "--strategy", "optimal,ratio"], "unknown strategy"),
    ],
)
def test_wrong_combinations(memfit, tiny, words, message):
    result = memfit("plan", *tiny, *words)
    assert result.exit_code == 2
    assert message in result.stderr and "hint: " in result.stderr
