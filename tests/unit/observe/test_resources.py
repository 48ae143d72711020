"""What a run takes before and after is what the machine says."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from memfit.api import fit_workload
from memfit.errors import UsageError
from memfit.measure.step import run_step, untouched
from memfit.observe import counters
from memfit.observe.resources import resources


def test_a_checkpoint_takes_what_torch_writes(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    before = [p.clone() for p in workload.model.parameters()]
    with untouched(workload):
        run_step(workload)
        file = io.BytesIO()
        state = workload.model.state_dict(), workload.optimizer.state_dict()
        torch.save({"model": state[0], "optimizer": state[1]}, file)
    with fit_workload(workload, "95%", executor="module", steps=1) as fitted:
        rows = {row.name: row for row in resources(fitted, workload).rows}
        assert fitted.applied.at_work
    stored = rows["storage of a checkpoint"]
    assert stored.before == stored.after
    assert stored.after.value == pytest.approx(file.tell(), rel=0.01)
    assert all(map(torch.equal, before, workload.model.parameters()))
    assert not workload.optimizer.state


def test_a_plain_step_that_did_not_fit_has_no_numbers(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    with fit_workload(workload, "95%", executor="module", steps=1) as fitted:
        baseline = replace(fitted.result.baseline, measured=False)
        fitted.result = replace(fitted.result, baseline=baseline)
        rows = {row.name: row for row in resources(fitted, workload, samples=8, epochs=1).rows}
    assert rows["device memory, peak"].before.how == "projected"
    for name in ("host memory, peak", "time of a step", "rate", "time of the run"):
        assert rows[name].before.value is None and rows[name].change is None
        assert "does not fit" in str(rows[name].before.why)
    assert rows["time of the run"].after.how == "projected"


def test_a_system_that_does_not_tell_its_peak(
    zoo: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "_RESET", "/proc/self/nothing")
    workload = zoo.workload(zoo.Stack)
    with fit_workload(workload, "95%", executor="module", steps=1) as fitted:
        rows = {row.name: row for row in resources(fitted, workload).rows}
    host = rows["host memory, peak"].after
    assert host.how == "not measured" and "cannot be read" in str(host.why)


@pytest.mark.parametrize("count", [{"samples": 0}, {"samples": 4, "epochs": 0}])
def test_counts_are_positive(zoo: SimpleNamespace, count: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="is 0"):
        resources(None, zoo.workload(zoo.Stack), **count)  # type: ignore[arg-type]
