"""Planned and plain steps that cannot be timed in turn are timed one after another."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from memfit.capture.profile import profile_workload
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime.apply import Applied
from memfit.verify.speed import compare_speed


@pytest.mark.parametrize("change", [{"trim": True}, {"cuda_graphs": True}])
@pytest.mark.parametrize("beside", [False, True], ids=["the plain step", "everything kept"])
def test_steps_in_each_others_way(
    zoo: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, bool],
    beside: bool,
) -> None:
    workload = zoo.workload(zoo.Stack)
    plan = make_plan(profile_workload(workload, rounds=1), Goal(strategy="all"))
    released: list[Applied] = []
    monkeypatch.setattr(Applied, "release", lambda self: released.append(self))
    planned = Applied(replace(plan, **change), workload.model)
    planned.graphs = None  # there are none on a CPU
    unplanned = Applied(plan.unplanned(), workload.model) if beside else None
    speed = compare_speed(workload, planned, steps=2, unplanned=unplanned)
    assert speed.ratio is not None and speed.same_code_ratio is not None
    assert released.count(planned) == 4  # before each of three, and after the last
    assert unplanned is None or released.count(unplanned) == 4
