"""`memfit resources`: every number with its mark."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memfit.ir.result import Numerics

Run = Callable[..., Any]
MARKS = {"measured", "projected", "not measured"}


def test_every_number_has_a_mark(memfit: Run, tiny: list[str], tmp_path: Path) -> None:
    file = tmp_path / "resources.json"
    run = ["--samples", "1001", "--epochs", "3", "--steps", "1", "-o", str(file)]
    result = memfit("resources", *tiny, "--budget", "95%", *run, "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    rows = {row["name"]: row for row in data["rows"]}
    assert {
        amount["how"] for row in rows.values() for amount in (row["before"], row["after"])
    } <= MARKS
    peak = rows["device memory, peak"]
    assert peak["after"]["value"] <= data["budget_bytes"] < peak["before"]["value"]
    step = rows["time of a step"]["after"]["value"]
    batches = -(-1001 // 4)
    assert rows["time of an epoch"]["after"]["value"] == pytest.approx(step * batches)
    assert rows["time of the run"]["after"]["value"] == pytest.approx(step * batches * 3)
    assert rows["time of the run"]["after"]["how"] == "projected"
    assert rows["rate"]["after"]["value"] == pytest.approx(4 / step)
    assert json.loads(file.read_text())["command"].startswith("memfit")


def test_what_is_not_known_says_why(memfit: Run, tiny: list[str], tmp_path: Path) -> None:
    file = tmp_path / "resources.md"
    result = memfit("resources", *tiny, "--budget", "95%", "--steps", "1", "-o", str(file))
    assert result.exit_code == 0, result.stderr
    assert "not measured" in result.stdout and "give --samples" in result.stdout
    text = file.read_text()
    assert "| time of an epoch | - | not measured | - | not measured |  |" in text
    assert "- time of the run: give --samples and --epochs" in text


def test_numbers_that_differ_are_no_success(
    memfit: Run, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Numerics, "kept", property(lambda self: False))
    result = memfit("resources", *tiny, "--budget", "95%", "--steps", "1")
    assert result.exit_code == 1 and "device memory, peak" in result.stdout


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "there is no budget to compare with"),
        (["--budget", "95%", "--epochs", "3"], "--epochs without --samples"),
        (["--budget", "95%", "-o", "/nowhere/r.json"], "there is no folder '/nowhere'"),
    ],
)
def test_bad_input_is_refused(memfit: Run, tiny: list[str], words: list[str], error: str) -> None:
    result = memfit("resources", *tiny, *words)
    assert result.exit_code == 2
    assert error in result.stderr and "hint: " in result.stderr
