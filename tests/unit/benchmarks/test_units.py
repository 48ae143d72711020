"""Units are saved as they end, gone on with after a cut, and not begun without time for them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import common
import pytest

ROWS = "rows"


def markdown(report: common.Report) -> str:
    return " ".join(f"{key}={row}" for key, row in report[ROWS].items())


def made(asked: Any, *words: str, **runs: Callable[[], common.Row]) -> tuple[Any, Any, list[Any]]:
    arguments = asked(*words)
    report = common.open_report(arguments, ROWS)
    units = [common.Unit(report[ROWS], key, run, f"unit {key}", 10) for key, run in runs.items()]
    return arguments, report, units


def test_a_run_that_was_killed_goes_on_where_it_stopped(asked):
    ran: list[str] = []

    def row(key: str) -> Callable[[], common.Row]:
        return lambda: ran.append(key) or {"value": key}

    def killed() -> common.Row:
        raise KeyboardInterrupt  # as a kill: nothing is caught

    with pytest.raises(KeyboardInterrupt):
        common.run_units(*made(asked, a=row("a"), b=killed), markdown)
    arguments = asked()
    assert json.loads(arguments.output.read_text())[ROWS] == {"a": {"value": "a"}}
    assert "a={'value': 'a'}" in arguments.output.with_suffix(".md").read_text()
    common.run_units(*made(asked, a=row("a"), b=row("b")), markdown)
    assert ran == ["a", "b"]
    saved = json.loads(arguments.output.read_text())
    assert list(saved[ROWS]) == ["a", "b"] and set(saved["seconds"]) == {"unit a", "unit b"}
    assert not list(arguments.output.parent.glob("*.part"))


def test_a_failure_is_a_row_and_is_tried_again(asked, capsys):
    def fails() -> common.Row:
        raise ValueError("it broke\nin two lines")

    common.run_units(*made(asked, a=fails, b=lambda: {"fine": True}), markdown)
    rows = json.loads(asked().output.read_text())[ROWS]
    assert rows == {"a": {"error": "ValueError: it broke"}, "b": {"fine": True}}
    arguments, report, units = made(asked, a=lambda: {"fine": True}, b=fails)
    assert [unit.missing for unit in units] == [True, False]
    common.run_units(arguments, report, units, markdown)
    assert report[ROWS] == {"a": {"fine": True}, "b": {"fine": True}}


def test_nothing_is_begun_that_would_not_end_in_time(asked, capsys):
    words = ("--time-limit", "15")
    arguments, report, units = made(asked, *words, a=lambda: {"x": 1}, b=lambda: {"x": 2})
    slow = common.Unit(report[ROWS], "slow", lambda: {"x": 3}, "unit slow", 16)
    unknown = common.Unit(report[ROWS], "unknown", lambda: {"x": 4}, "unit unknown")
    common.run_units(arguments, report, [slow, units[0], unknown, units[1]], markdown)
    assert list(report[ROWS]) == ["a", "b"]
    said = capsys.readouterr().out
    assert "unit slow" in said and "unit unknown" in said and "76 s  in all" in said


def test_a_unit_takes_as_long_as_it_took(asked):
    _, report, (unit,) = made(asked, a=lambda: {"x": 1})
    assert common.expected_s(unit, report) == 10
    assert common.expected_s(unit, report, tiny=True) == common.TINY_S
    report["seconds"]["unit a"] = 25.0
    assert common.expected_s(unit, report, tiny=True) == common.expected_s(unit, report) == 25


def test_an_estimate_runs_and_writes_nothing(asked, capsys):
    def never() -> common.Row:
        raise AssertionError("was run")

    common.run_units(*made(asked, "--estimate", a=never), markdown)
    assert "10 s  unit a" in capsys.readouterr().out
    assert not asked().output.exists()


def test_a_file_of_another_machine_is_refused_but_for_what_no_machine_makes(asked):
    arguments, report, units = made(asked, a=lambda: {"x": 1})
    report["machine"]["gpu"] = "another"
    common.run_units(arguments, report, units, markdown)
    with pytest.raises(SystemExit, match="gpu was 'another' and is"):
        common.open_report(asked())
    assert common.open_report(asked(), elsewhere=True)[ROWS]
    assert common.open_report(asked("--estimate"))[ROWS]


def test_commands_are_named_without_file_and_time(asked, monkeypatch):
    words = ["bench.py", "--only", "gpt2 bf16", "--time-limit", "9", "-o", "x.json"]
    monkeypatch.setattr(sys, "argv", words)
    arguments, report, units = made(asked, a=lambda: {"x": 1})
    common.run_units(arguments, report, units, markdown)
    again = common.open_report(asked())
    assert again["command"] == 'PYTHONPATH=src python3 benchmarks/bench.py --only "gpt2 bf16"'
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    assert common.open_report(asked())["command"].endswith(
        "; PYTHONPATH=src python3 benchmarks/bench.py"
    )
