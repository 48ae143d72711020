"""Steps without memfit beside the plan: peaks, seconds, and why there are none."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import pytest
import torch

import memfit
from memfit.errors import UsageError
from memfit.ir.codec import from_data, to_data
from memfit.ir.result import Result
from memfit.report.fit import reference_rows
from memfit.verify import references


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 64), torch.nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def workload() -> memfit.Workload:
    model = torch.nn.Sequential(*(Block() for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    return memfit.Workload(model, lambda m, x: m(x).square().mean(), optimizer, torch.randn(256, 8))


def fit(what: memfit.Workload, **options: Any) -> Result:
    how: dict[str, Any] = {"steps": 1, "executor": "graph"}
    with memfit.fit_workload(what, "80%", **how, **options) as fitted:
        return fitted.result


def _whole_steps_by(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have whole steps compiled by this backend; segments name their own."""
    compile_with = torch.compile

    def compiled(function: Any, **how: Any) -> Any:
        return compile_with(function, **{"backend": backend, **how, "mode": None})

    monkeypatch.setattr(torch, "compile", compiled)


def test_the_eager_step_is_measured_beside_the_plan_and_nothing_is_changed() -> None:
    what = workload()
    before = copy.deepcopy(what.model.state_dict())
    result = fit(what, references=("eager",))
    assert all(map(torch.equal, before.values(), what.model.state_dict().values()))
    assert not what.optimizer.state
    assert result.references is not None and result.references["compiled"] is None
    eager = result.references["eager"]
    assert eager is not None and eager.peak_bytes is not None and eager.planned_ratio is not None
    assert eager.peak_bytes > result.measured.peak_bytes and eager.planned_ratio > 0
    assert from_data(Result, to_data(result)) == result
    ((name, said),) = reference_rows(result)
    assert name == "eager" and "the planned step takes" in str(said)


def test_the_compiled_step_says_what_compiling_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled by dynamo alone here: what inductor makes of it takes a minute."""
    _whole_steps_by("eager", monkeypatch)
    result = fit(workload(), references=("compiled", "eager"))
    assert result.references is not None
    compiled, eager = result.references["compiled"], result.references["eager"]
    assert compiled is not None and eager is not None
    assert compiled.eager_ratio is not None and eager.eager_ratio is None
    assert compiled.step_s == pytest.approx(compiled.eager_ratio * (eager.step_s or 0))
    rows = dict(reference_rows(result))
    assert list(rows) == ["eager", "compiled"] and "the eager step" in str(rows["compiled"])


def test_a_step_that_cannot_be_compiled_leaves_the_fit_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> NoReturn:
        raise RuntimeError("No working C++ compiler found")

    _whole_steps_by(fails, monkeypatch)
    result = fit(workload(), references=references.REFERENCES)
    assert result.verdict == "fits" and result.references is not None
    compiled, eager = result.references["compiled"], result.references["eager"]
    assert compiled is not None and compiled.step_s is None and eager is not None
    assert "No working C++ compiler" in str(compiled.why_not) and eager.step_s is not None
    assert str(dict(reference_rows(result))["compiled"]).startswith("not measured: ")


def test_an_unknown_reference_is_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="unknown reference 'eagre'") as refused:
        fit(workload(), references=("eagre",))
    assert refused.value.hint == "there are: eager, compiled"


def test_without_a_name_nothing_is_measured() -> None:
    assert fit(workload()).references is None
