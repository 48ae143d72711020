"""What the solver prints past its log settings goes nowhere: stdout is for data."""

from __future__ import annotations

import os

import pytest

from memfit.planning import solver


def test_what_the_solver_prints_does_not_reach_stdout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(solver, "milp", lambda cost, **_: os.write(1, b"noise") and cost)
    assert solver.solve_milp("answer", options={}) == "answer"
    print("data", flush=True)
    captured = capfd.readouterr()
    assert captured.out == "data\n"
    assert captured.err == ""
