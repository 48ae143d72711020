"""Where no code can be made, a step is run by its operators, or refused with the way out."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import pytest
import torch
from torch._inductor.exc import InvalidCxxCompiler
from typer.testing import CliRunner

import memfit
from memfit import api
from memfit.capture import compilable, profile
from memfit.cli.app import app
from memfit.errors import InfeasibleError, MemfitError
from memfit.runtime.compile.choice import CannotCompile, no_graph


class Block(torch.nn.Module):
    """A block that no other test has had compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def workload() -> memfit.Workload:
    model = torch.nn.Sequential(*(Block() for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    return memfit.Workload(model, lambda m, x: m(x).square().mean(), optimizer, torch.randn(64, 8))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which inductor finds no compiler."""

    def fails(*_: Any, **__: Any) -> NoReturn:
        raise InvalidCxxCompiler

    monkeypatch.setattr("memfit.runtime.compile.backend.compile_fx_inner", fails)


def test_a_refusal_by_layers_became_the_want_of_a_compiler_that_nobody_asked_for(
    no_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where layers by themselves were memfit's choice, compiled segments are its second one."""
    hold = api.hold_whole_step

    def not_by_layers(workload: Any, base: Any, *rest: Any) -> Any:
        if base.executor == "module":
            raise InfeasibleError("by its layers", budget_bytes=1, minimum_bytes=2)
        return hold(workload, base, *rest)

    monkeypatch.setattr(api, "resolve_executor", lambda *_: None)  # as on CUDA
    monkeypatch.setattr(api, "hold_whole_step", not_by_layers)
    monkeypatch.setattr(profile, "usual_executor", lambda *_, **__: "module")
    with memfit.fit_workload(workload(), "90%", steps=1) as fitted:
        assert fitted.plan.executor == "graph"
        assert any("not compiled: no code can be made" in note for note in fitted.result.notes)


def test_without_a_compiler_the_operators_are_run_and_it_is_said(
    no_compiler: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("memfit.api.resolve_executor", lambda *_: None)  # as on CUDA
    monkeypatch.setattr(profile, "usual_executor", lambda *_, **__: "inductor")
    with (
        caplog.at_level(logging.WARNING, compilable.__name__),
        memfit.fit_workload(workload(), "90%", steps=1) as fitted,
    ):
        assert fitted.plan.executor == "graph"
        (said,) = [n for n in fitted.result.notes if n.startswith("run by graph, not compiled: ")]
        assert "no code can be made for Block: No working C++ compiler" in said
        assert said in fitted.plan.notes
        assert [r.getMessage() for r in caplog.records].count(said) == 1
        assert torch.isfinite(fitted.step(fitted.workload.batch))


def test_without_a_compiler_an_executor_by_name_was_called_a_changed_model(
    no_compiler: None,
) -> None:
    with pytest.raises(CannotCompile, match="No working C\\+\\+ compiler") as refused:
        memfit.fit_workload(workload(), "90%", steps=1, executor="inductor")
    assert refused.value.exit_code == 3
    assert "--executor graph" in str(refused.value.hint)


def test_without_a_compiler_the_command_line_says_what_to_do(no_compiler: None) -> None:
    tiny = ["n_layer=2", "n_embd=24", "n_head=2", "n_ff=40", "vocab_size=50"]
    words = ["fit", "encoder", "--batch", "2", "--seq", "8", "--steps", "1", "--budget", "80%"]
    words += [word for field in tiny for word in ("--set", field)]
    result = CliRunner().invoke(app, [*words, "--executor", "inductor"])
    assert result.exit_code == 3
    assert "No working C++ compiler" in result.stderr
    assert "hint: install what makes the code" in result.stderr
    assert "new plan" not in result.stderr


def test_memory_that_ran_out_while_compiling_is_no_lack_of_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from memfit.runtime.compile import backend

    def fails(*_: Any, **__: Any) -> NoReturn:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(backend, "compile_fx_inner", fails)
    with pytest.raises(torch.OutOfMemoryError):
        backend._code(torch.fx.symbolic_trace(torch.nn.ReLU()), [], "Block", {})


def test_a_segment_without_code_keeps_its_reason() -> None:
    reason = CannotCompile("no code can be made for Block: none")
    assert no_graph(reason) is reason
    assert isinstance(reason, MemfitError)
