"""`memfit batch-size`: table, last line, JSON and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


def test_it_ends_with_one_line_that_sums_it_up(memfit: Run, tiny: list[str]) -> None:
    result = memfit("batch-size", *tiny, "--budget", "8MiB", "--steps", "1")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    for word in ("predicted", "peak", "samples/s", "holds", "largest", "fastest"):
        assert word in result.stdout
    last = result.stdout.splitlines()[-1]
    for word in ("largest batch ", "8.00 MiB", "samples/s", "fastest ", " runs; "):
        assert word in last
    assert "; next: memfit fit encoder --batch 1" in last and last.endswith("--budget 8388608")


def test_json_holds_the_contract(memfit: Run, tiny: list[str]) -> None:
    result = memfit("batch-size", *tiny, "--budget", "8MiB", "--steps", "1", "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["schema_version"] == 1
    assert data["budget_bytes"] == 8 * 2**20
    assert data["num_runs"] == len(data["trials"]) <= 5
    assert data["largest"] in data["trials"] and data["fastest"] in data["trials"]
    assert data["largest"]["holds"] and data["largest"]["samples_per_s"] > 0
    assert data["largest"]["peak_bytes"] <= data["budget_bytes"]
    assert data["largest"]["size"] > 4
    assert data["planned"] is None
    assert {"workload", "device", "notes"} <= data.keys()


def test_with_plan_a_larger_batch_is_verified(memfit: Run, tiny: list[str]) -> None:
    words = ["--budget", "8MiB", "--steps", "1", "--with-plan", "--executor", "module"]
    result = memfit("batch-size", *tiny, *words, "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["planned"]["size"] > data["largest"]["size"]
    assert data["planned"]["peak_bytes"] <= data["budget_bytes"]
    assert data["planned"]["samples_per_s"] > 0


def test_utilization_is_a_share_of_the_device(memfit: Run, tiny: list[str]) -> None:
    words = ["--utilization", "0.5", "--max-size", "3", "--steps", "1"]
    data = json.loads(memfit("batch-size", *tiny, *words, "--json").stdout)
    device = data["device"]
    free = int(0.97 * device["free_bytes"])  # no more than that can be run on a CPU
    assert data["budget_bytes"] == min(int(0.5 * device["capacity_bytes"]), free)
    assert data["largest"]["size"] == 3
    shown = memfit("batch-size", *tiny, *words).stdout
    assert "note: larger batches than 3 were not looked for" in shown


def test_an_impossible_budget_is_a_no_with_the_bytes(memfit: Run, tiny: list[str]) -> None:
    result = memfit("batch-size", *tiny, "--budget", "100KiB", "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["schema_version"] == 1 and data["verdict"] == "infeasible"
    assert data["minimum_feasible_bytes"] > data["budget_bytes"] == 102400
    assert str(data["minimum_feasible_bytes"]) in result.stderr
    assert "\nhint: give a larger budget" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is no budget to fill"),
        (["--budget", "1GiB", "--utilization", "0.5"], "exclude each other"),
        (["--utilization", "1.5"], "not a share of the device"),
        (["--utilization", "0"], "not a share of the device"),
        (["--budget", "60%"], "means nothing while its batch size is open"),
        (["--budget", "lots"], "not a number of bytes"),
        (["--budget", "1MiB", "--allow", "+offload"], "no plan is asked for"),
        (["--budget", "1MiB", "--executor", "gpu", "--with-plan"], "unknown executor"),
    ],
)
def test_wrong_words_are_refused(
    memfit: Run, tiny: list[str], words: list[str], message: str
) -> None:
    result = memfit("batch-size", *tiny, *words)
    assert result.exit_code == 2
    assert message in result.stderr and "\nhint: " in result.stderr
    assert result.stdout == ""


def test_a_batch_whose_tensors_disagree_is_refused(memfit: Run, workload_file) -> None:
    target = workload_file(batch="(torch.ones(2, 4), torch.ones(3))", loss="model(batch[0]).mean()")
    result = memfit("batch-size", target, "--budget", "1MiB")
    assert result.exit_code == 2
    assert "do not agree on a first dimension: (2, 4), (3,)" in result.stderr


def test_a_step_that_cannot_be_run_exits_with_three(memfit: Run, workload_file) -> None:
    target = workload_file(loss="model(batch[:, :2]).mean()")
    result = memfit("batch-size", target, "--budget", "1MiB")
    assert result.exit_code == 3
    assert "the training step of mine.py:workload failed" in result.stderr


def test_the_next_command_works_for_files_with_and_without_a_batch(
    memfit: Run, workload_file: Callable[..., str]
) -> None:
    words = ["--budget", "1MiB", "--steps", "1", "--max-size", "4"]
    target = workload_file()
    last = memfit("batch-size", target, *words).stdout.splitlines()[-1]
    assert f"; next: make the batch of {target} 4, then memfit fit {target} --budget" in last
    path = target.rpartition(":")[0]
    text = Path(path).read_text().replace("def workload()", "def workload(batch=2)")
    Path(path).write_text(text.replace("torch.ones(2, 4)", "torch.ones(batch, 4)"))
    last = memfit("batch-size", target, *words).stdout.splitlines()[-1]
    assert f"; next: memfit fit {target} --batch 4 --budget" in last
