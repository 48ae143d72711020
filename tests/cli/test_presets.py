"""--preset and --config: where a command starts from, and what goes before it."""

from __future__ import annotations

import json


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


def test_what_a_preset_cannot_be(memfit, tiny, tmp_path):
    unknown = memfit("fit", *tiny, "--budget", "90%", "--preset", "huge")
    assert unknown.exit_code == 2 and "conservative" in unknown.stderr
    streamed = memfit("fit", *tiny, "--preset", "50b-24gib")
    assert streamed.exit_code == 2 and "larger than the budget" in streamed.stderr
    file = tmp_path / "wrong.toml"
    file.write_text("budgets = 3\n")
    wrong = memfit("plan", *tiny, "--config", str(file))
    assert wrong.exit_code == 2 and "unknown field" in wrong.stderr
