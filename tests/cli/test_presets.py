"""--preset and --config: where a command starts from, and what goes before it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memfit.cli.goal import GoalOptions
from memfit.cli.starting import started
from memfit.cli.target import Target
from memfit.config import Config, load, named
from memfit.errors import UsageError


def test_a_preset_says_how_far_a_fit_may_go(memfit, tiny):
    start = ["fit", *tiny, "--budget", "80%", "--preset", "conservative", "--json"]
    found = memfit(*start, "--max-slowdown", "100", "--steps", "1")
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)["decisions"]["techniques"] == ["recompute"]


def test_a_file_gives_the_budget_and_the_command_line_goes_first(memfit, tiny, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('budget = "90%"\nallow = ["recompute"]\nexecutor = "module"\n')
    planned = memfit("plan", *tiny, "--config", str(file), "--json")
    assert planned.exit_code == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert plan["executor"] == "module"
    other = memfit("plan", *tiny, "--config", str(file), "--executor", "graph", "--json")
    assert json.loads(other.stdout)["executor"] == "graph"


def test_a_preset_becomes_a_file_to_change(memfit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = memfit("init", "--preset", "124m-4gib")
    assert written.exit_code == 0, written.stderr
    assert written.stdout.splitlines()[-1] == "next: memfit fit TARGET --config memfit.toml"
    assert load(tmp_path / "memfit.toml") == named("124m-4gib")
    again = memfit("init", "--preset", "balanced")
    assert again.exit_code == 2 and "exists already" in again.stderr
    other = memfit("init", "mine.json", "--preset", "balanced", "--json")
    assert json.loads(other.stdout)["file"] == "mine.json"
    assert load(tmp_path / "mine.json") == named("balanced")
    unknown = memfit("init", "--preset", "huge")
    assert unknown.exit_code == 2 and "one of: conservative" in unknown.stderr


def test_what_a_preset_cannot_be(memfit, tiny, tmp_path):
    unknown = memfit("fit", *tiny, "--budget", "90%", "--preset", "huge")
    assert unknown.exit_code == 2 and "conservative" in unknown.stderr
    for name in ("7b-24gib", "50b-24gib"):
        too_large = memfit("fit", *tiny, "--preset", name)
        assert too_large.exit_code == 2 and "larger than the budget" in too_large.stderr
    file = tmp_path / "wrong.toml"
    file.write_text("budgets = 3\n")
    wrong = memfit("plan", *tiny, "--config", str(file))
    assert wrong.exit_code == 2 and "unknown field" in wrong.stderr


def options(**given: Any) -> GoalOptions:
    names = ("budget", "utilization", "activation_reduction", "max_slowdown", "strategy")
    values = [given.get(name) for name in (*names, "interval")]
    return GoalOptions(*values, [], given.get("allow", []), given.get("executor"))


def target(**given: Any) -> Target:
    names = ("batch", "seq", "dtype", "optimizer", "device")
    return Target("encoder", *(given.get(name) for name in names), [])


def test_zeros_and_ones_that_are_given_go_before_a_preset(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("accumulate = 4\n")
    given = target(batch=0, seq=0), options(max_slowdown=0.0, budget="1GiB")
    what, goal, batches = started(*given, 1, "124m-4gib", file)
    assert (what.batch, what.seq, goal.max_slowdown, batches) == (0, 0, 0.0, 1)
    what, goal, batches = started(target(), options(), None, "124m-4gib", file)
    assert (what.batch, what.seq, goal.max_slowdown, batches) == (8, 1024, 2.0, 4)
    assert started(target(), options(), None, None, None)[2] == 1


def test_accumulate_once_goes_before_a_file(memfit, tiny, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('accumulate = 4\nbudget = "90%"\n')
    for words, said in ([], True), (["--accumulate", "1"], False):
        planned = memfit("plan", *tiny, "--config", file, *words)
        assert planned.exit_code == 0, planned.stderr
        assert ("--accumulate 4" in planned.stdout.splitlines()[-1]) == said


def test_a_batch_of_none_is_refused_with_a_recipe(memfit):
    refused = memfit("plan", "encoder", "--preset", "124m-4gib", "--batch", "0")
    assert refused.exit_code == 2 and "must be at least 1" in refused.stderr


def test_a_limit_without_a_budget_is_one_on_the_choices(memfit, tiny, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("max_slowdown = 50\n")
    shown = memfit("fit", *tiny, "--config", file)
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.splitlines()[-1].endswith("--max-slowdown 50")
    file.write_text("max_slowdown = 1.0\n")
    shown = memfit("fit", *tiny, "--config", file, "--json")
    assert shown.exit_code == 0, shown.stderr
    assert all(choice["slowdown"] <= 1 + 1e-9 for choice in json.loads(shown.stdout)["choices"])


def test_no_choice_within_the_limit(memfit, tiny, monkeypatch):
    monkeypatch.setattr("memfit.cli.sweep.choices", lambda *given: [])
    shown = memfit("fit", *tiny, "--preset", "conservative")
    assert shown.exit_code == 0, shown.stderr
    last = shown.stdout.splitlines()[-1]
    assert last.startswith("no plan found within 1.1x the plain step's time, nothing fitted; next")
    assert "memfit plan encoder" in last and "--sweep" in last


REACHED: dict[str, Any] = {
    "budget": "2GiB",
    "utilization": 0.5,
    "activation_reduction": 0.4,
    "max_slowdown": 1.5,
    "strategy": "ratio",
    "interval": 2,
    "segments": ["layers.*"],
    "allow": ["offload"],
    "force": ["microbatch"],
    "host_budget": "1GiB",
    "executor": "module",
    "min_tensor_bytes": 1000,
    "accumulate": 4,
    "batch": 3,
    "seq": 16,
    "dtype": "bf16",
    "optimizer": "sgd",
}
GOALS = ("budget", "utilization", "activation_reduction")
NEEDED = {"interval": {"strategy": "interval"}, "host_budget": {"allow": ["offload"]}}


def test_every_field_of_a_file_reaches_the_fit(memfit, tmp_path, monkeypatch):
    def asked(data: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def resolve(name: str, **options: Any) -> Any:
            found.update(options)
            return SimpleNamespace(device=torch.device("cpu"))

        def fit(workload: Any, budget: Any, **options: Any) -> None:
            found.update(options, budget=budget)
            raise UsageError("far enough", hint="none")

        monkeypatch.setattr("memfit.targets.resolve_target", resolve)
        monkeypatch.setattr("memfit.api.fit_workload", fit)
        file = tmp_path / "mine.json"
        file.write_text(json.dumps(data))
        ended = memfit("fit", "encoder", "--config", file)
        assert ended.exit_code == 2 and "far enough" in ended.stderr, ended.stderr
        found.pop("progress")
        return found

    assert list(REACHED) == [field.name for field in fields(Config)]
    for name, value in REACHED.items():
        base = NEEDED.get(name, {}) | ({} if name in GOALS[1:] else {"budget": "1GiB"})
        plain, given = asked(base or {"budget": "1GiB"}), asked(base | {name: value})
        changed = {key for key in plain if plain[key] != given[key]}
        assert changed == {"budget" if name == "utilization" else name, *["budget"] * (not base)}
    assert asked({"utilization": 1.0})["budget"] == 2 * asked({"utilization": 0.5})["budget"]


def test_a_file_is_nothing_for_a_report_of_files(memfit, tmp_path):
    refused = memfit("report", "run.json", "--preset", "balanced", "-o", tmp_path / "r.html")
    assert refused.exit_code == 2 and "there is no TARGET" in refused.stderr


def test_a_strategy_that_is_given_leaves_the_budget_of_a_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('budget = "70%"\n')
    _, goal, _ = started(target(), options(strategy="ratio"), None, None, file)
    assert (goal.budget, goal.strategy) == ("70%", "ratio")
    _, goal, _ = started(target(), options(utilization=0.5), None, None, file)
    assert (goal.budget, goal.utilization) == (None, 0.5)


@pytest.mark.parametrize("name", ["balanced", "aggressive", "maximum"])
def test_choices_are_planned_without_what_a_preset_has_for_one_budget(memfit, tiny, name):
    shown = memfit("fit", *tiny, "--preset", name)
    assert shown.exit_code == 0, shown.stderr
    assert "many budgets: planned without step_in_backward" in shown.stdout
    last = shown.stdout.splitlines()[-1]
    assert all(f"--allow {technique}" in last for technique in named(name).allow)


def test_a_sweep_leaves_out_the_budget_and_the_step_techniques_of_a_file(memfit, tiny, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('budget = "70%"\nallow = ["recompute", "tiled_loss"]\n')
    shown = memfit("plan", *tiny, "--config", file, "--sweep", "--json")
    assert shown.exit_code == 0, shown.stderr
    (note,) = json.loads(shown.stdout)["notes"]
    assert note.endswith("without --budget 70%, tiled_loss of the preset or file")


def test_what_is_given_for_one_budget_is_refused_for_many(memfit, tiny, tmp_path):
    refused = memfit("fit", *tiny, "--preset", "conservative", "--allow", "+tiled_loss")
    assert refused.exit_code == 2 and "tiled_loss is tried for one budget" in refused.stderr
    refused = memfit("plan", *tiny, "--preset", "balanced", "--sweep", "--budget", "70%")
    assert refused.exit_code == 2 and "--budget is for one plan" in refused.stderr
    file = tmp_path / "mine.toml"
    file.write_text('allow = ["tiled_loss"]\n')
    refused = memfit("plan", *tiny, "--config", file, "--sweep")
    assert refused.exit_code == 2 and "allows only tiled_loss" in refused.stderr


def test_a_name_with_plus_adds_to_a_preset_and_one_without_replaces_it(tmp_path):
    def allowed(names: list[str], preset: str | None, file: Path | None = None) -> list[str]:
        return list(started(target(), options(allow=names), None, preset, file)[1].allow)

    balanced = list(named("balanced").allow)
    assert allowed(["+tiled_loss, +recompute"], "balanced") == [*balanced, "tiled_loss"]
    assert allowed(["offload,+tiled_loss"], "balanced") == ["offload", "+tiled_loss"]
    file = tmp_path / "mine.toml"
    file.write_text('allow = ["+tiled_loss"]\n')
    assert allowed([], "balanced", file) == [*balanced, "tiled_loss"]
    assert allowed(["+offload"], None, file) == ["+tiled_loss", "+offload"]
