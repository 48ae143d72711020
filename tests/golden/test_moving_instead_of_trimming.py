"""Both together, on a long sequence of a Llama on an H200.

At budgets near the least that recomputing can hold it gives its free pages back in every step.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from memfit.ir.profile import Profile
from memfit.planning import rivals
from memfit.planning.placed import holds, seconds
from memfit.planning.request import Choice, Request
from memfit.planning.simulate import Simulator, simulator_of
from memfit.planning.strategies import choose_all, choose_interval, choose_ratio

PROFILE = Path(__file__).with_name("llama_1b_long_h200.profile.json.gz")
BUDGET = 30000 * 2**20


def test_both_together_are_asked_until_pages_need_not_be_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulator = simulator_of(Profile.load(PROFILE), 0, ("recompute", "offload"))
    request = Request(BUDGET, float("inf"), host_bytes=2**36)
    held, trimmed = (
        Choice(choose_interval(simulator, request).acts),
        Choice(choose_all(simulator, request).acts, trim=True),
    )
    assert holds(simulator, held, BUDGET) and holds(simulator, trimmed, BUDGET)
    assert seconds(simulator, held) < seconds(simulator, trimmed)
    answers = [Choice(()), Choice(()), Choice(()), held]  # what is kept does not hold

    def asked(simulator: Simulator, request: Request) -> Choice:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def alone(_: Simulator, strategy: str, share: float, enough_s: float) -> Choice | None:
        return trimmed if strategy == "all" else None

    monkeypatch.setattr(rivals, "solve_optimal", asked)
    found = rivals.fastest_of_rivals(simulator, request, alone)
    assert found is not None and not found.trim
    assert holds(simulator, found, BUDGET)
    assert seconds(simulator, found) <= seconds(simulator, held)


def test_both_together_give_pages_back_where_that_pays_for_one_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulator = simulator_of(Profile.load(PROFILE), 0, ("recompute", "offload"))
    budget = 29316 * 2**20
    request = Request(budget, float("inf"), host_bytes=2**36)
    kept = choose_ratio(simulator, request)
    trimmed = Choice(choose_all(simulator, request).acts, trim=True)
    assert kept is not None and not holds(simulator, kept, budget)
    assert holds(simulator, replace(kept, trim=True), budget)

    def alone(_: Simulator, strategy: str, share: float, enough_s: float) -> Choice | None:
        return trimmed if strategy == "all" else None

    monkeypatch.setattr(rivals, "solve_optimal", lambda simulator, request: kept)
    monkeypatch.setattr(rivals, "made_faster", lambda simulator, choice, request: choice)
    found = rivals.fastest_of_rivals(simulator, request, alone)
    assert found is not None and found.trim
    assert found.acts == kept.acts
