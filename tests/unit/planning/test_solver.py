"""The solver prints nothing, as stdout is for data, and has its seconds on a busy machine, too."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest

from memfit.planning import solver


def test_what_the_solver_prints_does_not_reach_stdout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(solver, "milp", lambda cost, **_: os.write(1, b"noise") and cost)
    assert solver.solve_milp("answer", options={"time_limit": 9.0}) == "answer"
    print("data", flush=True)
    captured = capfd.readouterr()
    assert captured.out == "data\n"
    assert captured.err == ""


@pytest.mark.parametrize(("starved", "tried"), [(0, 1), (1, 2), (9, 1 + solver.MORE_TRIES)])
def test_a_solver_that_others_kept_waiting_has_its_seconds_again(
    monkeypatch: pytest.MonkeyPatch, starved: int, tried: int
) -> None:
    calls: list[float] = []

    def milp(*_: object, options: dict[str, float]) -> SimpleNamespace:
        calls.append(options["time_limit"])
        if len(calls) <= starved:
            time.sleep(options["time_limit"])
        return SimpleNamespace(x=len(calls))

    monkeypatch.setattr(solver, "milp", milp)
    assert solver.solve_milp(options={"time_limit": 0.05}).x == tried
    assert calls == [0.05] * tried


def test_a_solver_that_worked_all_its_seconds_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def milp(*_: object, options: dict[str, float]) -> None:
        calls.append(1)
        end = time.process_time() + options["time_limit"]
        while time.process_time() < end:
            pass

    monkeypatch.setattr(solver, "milp", milp)
    solver.solve_milp(options={"time_limit": 0.05})
    assert len(calls) == 1
