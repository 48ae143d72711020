"""`memfit fit`: table, last line, JSON and exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from memfit.ir.result import Numerics
from memfit.units import format_bytes


def test_fit_ends_with_one_line_that_sums_it_up(memfit, tiny):
    result = memfit("fit", *tiny, "--budget", "90%", "--steps", "2")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    for word in ("peak memory", "step time", "time / baseline", "of itself", "segments recomputed"):
        assert word in result.stdout
    last = result.stdout.splitlines()[-1]
    for word in ("budget ", "peak ", "(predicted ", "baseline", "numbers identical"):
        assert word in last
    assert last.endswith("--sweep") and "; next: memfit plan encoder --batch 4" in last


def test_fit_json_holds_the_contract(memfit, tiny, tmp_path):
    path = tmp_path / "run.json"
    result = memfit("fit", *tiny, "--budget", "90%", "--steps", "1", "--json", "-o", path)
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["schema_version"] == 1
    assert data["verdict"] == "fits"
    assert data["measured"]["peak_bytes"] <= data["budget_bytes"]
    contract = {
        "baseline": "peak_bytes peak_reserved_bytes static_bytes step_s measured",
        "predicted": "peak_bytes step_s lower_bound_s gap",
        "measured": "peak_bytes peak_reserved_bytes step_s step_s_spread",
        "decisions": "kept_bytes recomputed_bytes offloaded_bytes num_segments techniques",
        "numerics": "bitwise_vs_unplanned loss_max_abs_diff grad_max_rel_diff error_vs_reference",
    }
    for part, names in contract.items():
        assert set(names.split()) <= data[part].keys()
    assert {"workload", "device", "references", "plan_s", "minimum_feasible_bytes"} <= data.keys()
    written = json.loads(path.read_text())
    assert data.items() <= written.items()
    assert written["plan"]["budget_bytes"] == data["budget_bytes"]


def test_without_a_goal_the_range_and_three_choices_are_printed(memfit, tiny):
    result = memfit("fit", *tiny)
    assert result.exit_code == 0, result.stderr
    assert "the smallest budget a plan can hold is" in " ".join(result.stdout.split())
    rows = [line.split()[0] for line in result.stdout.splitlines() if "--budget" in line]
    assert rows[:3] == ["tight", "middle", "roomy"]
    assert "next: memfit fit encoder" in result.stdout.splitlines()[-1]


def test_without_a_goal_json_has_the_range_and_the_choices(memfit, tiny):
    data = json.loads(memfit("fit", *tiny, "--json").stdout)
    assert data["schema_version"] == 1
    budgets = [choice["budget_bytes"] for choice in data["choices"]]
    assert len(budgets) == 3 and budgets == sorted(budgets)
    assert data["minimum_feasible_bytes"] < budgets[0] < data["baseline"]["peak_bytes"]
    times = [choice["predicted"]["step_s"] for choice in data["choices"]]
    assert times == sorted(times, reverse=True)


def test_an_impossible_budget_is_refused_with_the_smallest(memfit, tiny):
    result = memfit("fit", *tiny, "--budget", "10%", "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["schema_version"] == 1
    assert data["verdict"] == "infeasible"
    assert data["budget_bytes"] < data["minimum_feasible_bytes"]
    assert str(data["minimum_feasible_bytes"]) in data["error"]
    assert data["hint"] and data["exit_code"] == 1
    parts = data["incompressible_bytes"]
    assert parts.keys() == {"fixed", "forward", "backward"} and min(parts.values()) > 0
    assert (
        parts["fixed"] + max(parts["forward"], parts["backward"])
        <= (data["minimum_feasible_bytes"])
    )
    assert f"no plan fits into {format_bytes(data['budget_bytes'])}" in result.stderr
    assert "\nhint: try --budget" in result.stderr


def test_the_refused_minimum_and_two_percent_works(memfit, tiny):
    refused = json.loads(memfit("fit", *tiny, "--budget", "1000", "--json").stdout)
    budget = round(1.02 * refused["minimum_feasible_bytes"])
    result = memfit("fit", *tiny, "--budget", budget, "--steps", "1")
    assert result.exit_code == 0, result.stderr


def test_a_saved_plan_is_run(memfit, tiny, plan_file):
    result = memfit("fit", *tiny, "--plan", plan_file, "--steps", "1", "--json")
    assert result.exit_code == 0, result.stderr
    budget = json.loads(plan_file.read_text())["budget_bytes"]
    assert json.loads(result.stdout)["budget_bytes"] == budget


def test_other_goals_and_strategies(memfit, tiny):
    words = ["--activation-reduction", "0.3", "--max-slowdown", "4", "--strategy", "ratio"]
    result = memfit("fit", *tiny, *words, "--steps", "1", "--accumulate", "2")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1].endswith("--sweep --accumulate 2")
    result = memfit("fit", *tiny, "--strategy", "all", "--segments", "layers.*", "--steps", "1")
    assert result.exit_code == 0, result.stderr
    assert "2 of 2 segments recomputed" in result.stdout
    assert "none given" in result.stdout


def test_executor_and_tensor_size_reach_the_next_command(memfit, tiny):
    how = ["--executor", "module", "--min-tensor-bytes", "1KiB"]
    result = memfit("fit", *tiny, "--budget", "90%", *how, "--steps", "1")
    assert result.exit_code == 0, result.stderr
    assert "module for 6 segments" in result.stdout
    assert result.stdout.splitlines()[-1].endswith(f"--sweep {' '.join(how)}")
    choices = memfit("fit", *tiny, *how)
    assert choices.stdout.splitlines()[-1].endswith(" ".join(how))


def test_utilization_is_a_share_of_the_device(memfit, tiny):
    result = memfit("fit", *tiny, "--utilization", "0.5", "--steps", "1", "--json")
    data = json.loads(result.stdout)
    assert data["budget_bytes"] == int(0.5 * data["device"]["capacity_bytes"])


def _numbers_differ(monkeypatch: pytest.MonkeyPatch, note: str | None) -> None:
    differ = Numerics(False, 1e-3, 1e-4, agree=False, repeatable=note is None, note=note)
    monkeypatch.setattr("memfit.proof.check_numerics", lambda *args: differ)


def test_other_numbers_are_a_no(memfit, tiny, monkeypatch):
    _numbers_differ(monkeypatch, None)
    result = memfit("fit", *tiny, "--budget", "90%", "--steps", "1")
    assert result.exit_code == 1
    assert "numbers NOT identical" in result.stdout.splitlines()[-1]


def test_numbers_of_a_step_that_does_not_repeat_itself_are_told_but_no_failure(
    memfit, tiny, monkeypatch
):
    _numbers_differ(
        monkeypatch, "the unplanned step does not repeat itself either: two runs differ"
    )
    result = memfit("fit", *tiny, "--budget", "90%", "--steps", "1")
    assert result.exit_code == 0
    assert "does not repeat itself" in result.stdout.splitlines()[-1]


def test_what_the_workload_prints_does_not_mix_with_the_json(memfit, workload_file):
    target = workload_file("print('hello from the file')")
    result = memfit("fit", target, "--budget", "1MiB", "--steps", "1", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["verdict"] == "fits"
    assert "hello from the file" in result.stderr


def test_verbose_tells_what_is_done_on_stderr(memfit, workload_file):
    result = memfit("fit", workload_file(), "--budget", "1MiB", "--steps", "1", "-v")
    assert "INFO: timing steps\n" in result.stderr
    assert re.search(r"INFO: timing steps took \d+\.\d s\n", result.stderr)
    assert "INFO" not in result.stdout


def test_ctrl_c_in_the_solver_keeps_the_best_plan_found(memfit, tiny, monkeypatch):
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memfit.planning.optimal.fastest", interrupted)
    result = memfit("fit", *tiny, "--budget", "90%", "--steps", "1")
    assert result.exit_code == 0, result.stderr
    assert "note: the solver was interrupted: best plan found so far" in result.stdout


def test_output_of_fit_is_not_lost_in_a_missing_folder(memfit, tiny, tmp_path: Path):
    result = memfit("fit", *tiny, "--budget", "90%", "-o", tmp_path / "no" / "run.json")
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr


def test_techniques_of_the_step_are_told_and_left_out_of_the_sweep(memfit):
    sizes = "--set n_layer=2 --set n_embd=32 --set n_head=2 --set vocab_size=2000"
    ran = memfit(
        *f"fit transformers:gpt2 --batch 4 --seq 32 {sizes} --budget 60% --steps 1".split(),
        *"--executor module --allow +offload,+tiled_loss,+step_in_backward --explain".split(),
    )
    assert ran.exit_code == 0, ran.stderr
    shown = " ".join(ran.stdout.split())
    assert "technique" in shown and "why" in shown and "the unplanned peak goes from" in shown
    assert "tiled_loss taken" in shown and "step_in_backward" in shown
    last = ran.stdout.strip().splitlines()[-1]
    assert "--sweep" in last and "--allow +offload" in last and "tiled_loss" not in last


def test_what_stepping_in_backward_costs_a_scaled_or_accumulated_step_is_told(memfit, tmp_path):
    path = tmp_path / "scaled.py"
    path.write_text(
        "import torch\n"
        "import memfit\n"
        "def workload(scaled=True):\n"
        "    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(6)))\n"
        "    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)\n"
        "    scaler = torch.amp.GradScaler('cpu', init_scale=8.0) if scaled else None\n"
        "    loss_fn = lambda model, batch: model(batch).square().mean()\n"
        "    batch = torch.randn(4, 128)\n"
        "    return memfit.Workload(model, loss_fn, optimizer, batch, scaler=scaler)\n"
        "def plain():\n"
        "    return workload(scaled=False)\n"
    )
    words = "--budget 92% --steps 1 --allow +step_in_backward --explain".split()
    for target, more, said in (
        ("workload", [], "forward and backward run twice"),
        ("workload", ["--accumulate", "2"], "gradients of earlier batches wait"),
        ("plain", ["--accumulate", "2"], "gradients of earlier batches wait"),
    ):
        ran = memfit("fit", f"{path}:{target}", *words, *more)
        assert ran.exit_code == 0, ran.stderr
        shown = " ".join(ran.stdout.split())
        assert "step_in_backward taken" in shown
        assert said in shown
        assert "numbers identical" in shown


def test_parts_of_a_batch_are_no_accumulation(memfit, tiny):
    words = ["--allow", "microbatch", "--steps", "1", "--executor", "module"]
    result = memfit("fit", *tiny, "--budget", "85%", *words)
    assert result.exit_code == 0, result.stderr
    assert "microbatch" in result.stdout, "the batch was to be split"
    assert "--accumulate" not in result.stdout.splitlines()[-1]


def test_explain_tells_of_techniques_that_were_not_allowed(memfit, tiny):
    shown = memfit("plan", *tiny, "--budget", "2GiB", "--executor", "module", "--explain")
    assert shown.exit_code == 0, shown.stderr
    rows = " ".join(shown.stdout.split())
    assert "tiled_loss not taken - - not allowed: add --allow +tiled_loss" in rows
    assert "optim_8bit not taken - - approximate, not allowed: add --allow" in rows
    assert "step_in_backward not taken - - tried where nothing holds without it" in rows
    assert rows.count("recompute not taken") == 1 and "int8_weights_asymmetric" not in rows
