"""Other processes compile for this one: the same code, or none and a word about it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import async_compile
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import fresh_cache

from memfit.errors import UsageError
from memfit.runtime.compile import ahead, backend, compiled
from memfit.runtime.compile.compiled import CompiledSegments
from memfit.runtime.compile.joint import least_saved

WORKERS = 2


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 6))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout((x * self.weight).sin()).square()


class Norm(Squares):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x.exp(), (6,), self.weight)


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompiledSegments]:
    monkeypatch.setattr(ahead, "_failed", False)
    monkeypatch.setattr(compiled, "worker_count", lambda: 0 if ahead._failed else WORKERS)
    made = CompiledSegments("inductor")
    yield made
    made.close()


def _traced(segments: CompiledSegments, module: nn.Module) -> str:
    with segments.measuring():
        segments(module.forward, (_input(),), {})
    return str(segments.last_key)


def _traced_ahead(segments: CompiledSegments, module: nn.Module) -> str:
    with segments.ahead():
        key = _traced(segments, module)
        assert len(segments.workers.work) == 2, "its forward and its backward"
    return key


def _input() -> torch.Tensor:
    return torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()


def _step(segments: CompiledSegments, module: nn.Module, **planned: Any) -> list[torch.Tensor]:
    x = _input()
    torch.manual_seed(0)
    output = segments(module.forward, (x,), {}, **planned)
    module.zero_grad()
    output.sum().backward()
    gradients = [x.grad, *(p.grad for p in module.parameters())]
    return [output.detach(), *(g for g in gradients if g is not None)]


def _found() -> tuple[int, int]:
    found = counters["inductor"]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]


@pytest.mark.slow
def test_code_of_workers_is_found_and_is_that_of_one_process(segments: CompiledSegments) -> None:
    """Unplanned as in capture, and planned as when a plan is first run."""
    modules = [Squares(), Norm()]
    with fresh_cache():
        keys = [_traced(segments, module) for module in modules]
        plans = [{}, *({"key": k, "saved": least_saved(segments.graphs[k])} for k in keys[:1])]
        here = [_step(segments, modules[0], **plan) for plan in plans]
        here.append(_step(segments, modules[1]))
        compilations = segments.compilations
    segments.close()
    with fresh_cache():
        with segments.measuring(), segments.ahead():
            for module in modules:
                segments(module.forward, (_input(),), {})
            assert len(segments.workers.work) == 4
        with segments.ahead():
            segments(modules[0].forward, (_input(),), {}, **plans[1])
            assert len(segments.workers.work) == 2
        hits, misses = _found()
        there = [_step(segments, modules[0], **plan) for plan in plans]
        there.append(_step(segments, modules[1]))
        assert _found() == (hits + 6, misses), "inductor compiled again what workers had"
    assert segments.compilations == 2 * compilations
    for a, b in zip(here, there, strict=True):
        assert all(map(torch.equal, a, b))


@pytest.mark.slow
def test_code_for_saved_tensors_that_lie_in_another_way_is_found(
    segments: CompiledSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor turns convolutions around: their backward is not the traced one's."""
    kept = []
    compile_half = backend.compile_fx_inner

    def noted(half: Any, inputs: Any, **options: Any) -> Any:
        traced = backend._output_strides(half)
        compiled = compile_half(half, inputs, **options)
        if not options.get("is_backward"):
            kept.append(backend._keeps_strides(traced))
        return compiled

    module = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3))
    images = torch.randn(2, 8, 9, 9, requires_grad=True)
    with fresh_cache():
        with segments.measuring(), segments.ahead():
            segments(module.forward, (images,), {})
            assert len(segments.workers.work) == 2
        monkeypatch.setattr(backend, "compile_fx_inner", noted)
        hits, misses = _found()
        segments(module.forward, (images,), {}).sum().backward()
        assert _found() == (hits + 2, misses)
    assert kept == [False] and not ahead._failed


def test_the_log_tells_what_was_compiled_and_how_long_it_took(
    segments: CompiledSegments, caplog: pytest.LogCaptureFixture
) -> None:
    module = Squares()
    with caplog.at_level(logging.INFO):
        key = _traced(segments, module)
        _step(segments, module)
        kept = least_saved(segments.graphs[key])
        _step(segments, module, key=key, saved=kept)
    records = [r for r in caplog.records if r.name.startswith("memfit")]
    first, second, third = (record.getMessage() for record in records)
    assert first.startswith("compiled Squares, unplanned, operators one by one: ")
    assert first.endswith(" 0.0 s of these for code")
    assert second.startswith("compiled Squares, unplanned: ")
    assert third.startswith(f"compiled Squares, keeping {len(kept)} tensors: ")


def test_workers_are_as_many_as_asked_for_and_cores_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ahead, "_failed", False)
    monkeypatch.delenv(ahead.ASKED, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    assert ahead.worker_count() == 0, "on the CPU each process has threads for all cores already"
    monkeypatch.setenv(ahead.ASKED, "3")
    assert ahead.worker_count() == 3
    monkeypatch.setenv(ahead.ASKED, "50")
    assert ahead.worker_count() == ahead.MOST_WORKERS
    assert CompiledSegments("graph").worker_count == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    assert ahead.worker_count() == 0
    monkeypatch.setenv(ahead.ASKED, "many")
    with pytest.raises(UsageError, match="MEMFIT_COMPILE_WORKERS is 'many'"):
        ahead.worker_count()


def test_a_process_with_a_gpu_and_some_cores_has_workers_unless_none_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ahead, "_failed", False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.delenv(ahead.ASKED, raising=False)
    counts = {}
    for cores in (2, 3, 4, 16):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, n=cores: set(range(n)))
        counts[cores] = ahead.worker_count()
    assert counts == {2: 0, 3: 0, 4: 3, 16: ahead.MOST_WORKERS}
    monkeypatch.setenv(ahead.ASKED, "0")
    assert ahead.worker_count() == 0


def test_a_worker_that_fails_is_said_once_and_is_the_last(
    segments: CompiledSegments, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no such device")

    monkeypatch.setattr(backend, "compile_fx_inner", fail)
    with caplog.at_level(logging.WARNING):
        _traced_ahead(segments, Squares())
    assert "no such device" in caplog.text and len(caplog.records) == 1
    assert " fail)" in caplog.text, "where it failed"
    with segments.measuring(), segments.ahead():
        segments(Norm().forward, (_input(),), {})
        assert not segments.workers.work


def test_inductor_is_loaded_before_anything_is_forked(
    segments: CompiledSegments, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU; what it compiles then leaves nothing behind."""
    asked: list[torch.device] = []
    monkeypatch.setattr(ahead, "_known_device", lambda: 1)
    monkeypatch.setattr(ahead, "_compile_once", asked.append)
    ahead.Workers(0).prepare()
    assert not asked
    with segments.ahead():
        assert asked == [torch.device("cuda", 1)]
    monkeypatch.setattr(ahead, "_compile_once", lambda device: 1 // 0)
    ahead.Workers(2).prepare()
    assert ahead._failed and "ZeroDivisionError" in caplog.text


@pytest.mark.slow
def test_what_is_compiled_to_load_inductor_is_not_kept() -> None:
    hits, misses = _found()
    with fresh_cache():
        ahead._compile_once(torch.device("cpu"))
    assert _found() == (hits, misses)


FAKES = """
import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from memfit.runtime.compile import ahead

with FakeTensorMode() as mode:
    x = FakeTensor(mode, torch.empty(3, 4, device="meta"), torch.device("cuda", 0))
    try:
        x[0]
        print("guarded: fine")  # where CUDA is, and this process may use it
    except RuntimeError:
        print("guarded: fails")
    ahead._leave_out_guards()
    y = x.clone()
    y[1:].copy_(x[0])
    assert y[1].device == torch.device("cuda", 0) and y[1].shape == (4,)
print("unguarded: fine")
"""


def test_fake_tensors_of_cuda_are_used_without_cuda() -> None:
    """In a forked process, inductor failed where it indexed its seeds: that sets the device."""
    run = subprocess.run([sys.executable, "-c", FAKES], capture_output=True, text=True)
    assert run.stdout.splitlines()[-1:] == ["unguarded: fine"], run.stderr
    if not torch.cuda.is_available():
        assert run.stdout.startswith("guarded: fails")


def test_a_process_that_cannot_fork_goes_on_alone(
    segments: CompiledSegments, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fork() -> int:
        raise OSError("cannot allocate memory")

    monkeypatch.setattr(os, "fork", fork)
    with segments.ahead():
        _traced(segments, Squares())
        assert not segments.workers.work
    assert "cannot allocate memory" in caplog.text


def test_a_worker_that_hangs_is_ended(
    segments: CompiledSegments, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "compile_fx_inner", lambda *_, **__: time.sleep(60))
    monkeypatch.setattr(ahead, "LIMIT_S", 1)
    begin = time.monotonic()
    _traced_ahead(segments, Squares())
    assert time.monotonic() - begin < 30
    assert "one after another" in caplog.text


def test_an_error_ends_the_workers(
    segments: CompiledSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "compile_fx_inner", lambda *_, **__: time.sleep(60))
    begin = time.monotonic()
    with pytest.raises(KeyError), segments.measuring(), segments.ahead():
        segments(Squares().forward, (_input(),), {})
        raise KeyError
    assert time.monotonic() - begin < 30 and not segments.workers.most


def test_nothing_is_timed_while_workers_run(
    segments: CompiledSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "compile_fx_inner", lambda *_, **__: None)
    module = Squares()
    key = _traced_ahead(segments, module)
    assert not any(node.seconds for node in segments.graphs[key].nodes)
    _traced(segments, module)
    assert any(node.seconds for node in segments.graphs[key].nodes)


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_are_compiled_side_by_side_and_never_loaded(
    segments: CompiledSegments,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fails: bool,
) -> None:
    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def precompile(self, *, warm_cache_only: bool) -> None:
            assert warm_cache_only and not fails, "no such kernel"
            (tmp_path / self.name).write_text(str(os.getpid()))

    def compile_half(*_: Any, **__: Any) -> None:
        for number in range(12):
            AsyncCompile().triton(f"kernel_{number}", "source", device_str="cuda")

    load = "_load_triton_kernel_from_source"
    monkeypatch.setattr(async_compile, load, lambda name, source: Kernel(name))
    monkeypatch.setattr(backend, "compile_fx_inner", compile_half)
    _traced_ahead(segments, Squares())
    assert ahead._failed is fails and ("no such kernel" in caplog.text) is fails
    processes = {path.read_text() for path in tmp_path.iterdir()}
    assert len(processes) == (0 if fails else 12) and str(os.getpid()) not in processes


def test_what_is_missing_now_and_then_ends_no_workers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ahead, "_failed", False)
    monkeypatch.setattr(ahead, "_used", {True: 0, False: 0})
    for _ in range(5):
        ahead.looked_for("Block", found=True)
    for _ in range(4):
        ahead.looked_for("Loss", found=False)
    assert not ahead._failed
    ahead.looked_for("Loss", found=False)
    assert ahead._failed and "what others made for Loss" in caplog.text


def test_where_nothing_is_found_there_are_no_more_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_failed", False)
    monkeypatch.setattr(ahead, "_used", {True: 0, False: 0})
    for _ in range(3):
        assert not ahead._failed
        ahead.looked_for("Block", found=False)
    assert ahead._failed
