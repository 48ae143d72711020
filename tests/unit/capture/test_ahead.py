"""Other processes compile what capture and the first run of a plan meet; numbers stay theirs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import async_compile

import memfit
from memfit.capture import captured
from memfit.capture.find import find_segments
from memfit.capture.learn import learn_variants
from memfit.capture.usual import surely_compiled
from memfit.ir.profile import Profile
from memfit.measure.step import untouched
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime.compile import ahead, backend, compiled
from memfit.runtime.compile.compiled import CompiledSegments
from memfit.targets import resolve_target

SMALL = {"n_layer": "3", "n_embd": "32", "n_head": "2", "vocab_size": "100"}


@pytest.fixture(scope="module")
def workload() -> memfit.Workload:
    return resolve_target("transformers:gpt2", batch=2, seq=32, overrides=SMALL)


def test_operators_are_timed_when_the_workers_of_capture_have_ended(
    workload: memfit.Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = CompiledSegments("inductor")
    monkeypatch.setattr(ahead, "_failed", False)
    monkeypatch.setattr(compiled, "worker_count", lambda: 2)
    monkeypatch.setattr(captured, "compiled_segments", lambda executor: segments)
    monkeypatch.setattr(backend, "compile_fx_inner", lambda *_, **__: None)
    with untouched(workload):
        found = captured.capture_segments(workload, find_segments(workload, None)[0], "inductor")
    assert segments.made_ahead == {
        (graph.key, None, half) for graph in found.graphs for half in (False, True)
    }
    assert found.graphs and not segments.workers.most and not ahead._failed
    for graph in found.graphs:
        assert sum(node.seconds for node in graph.nodes) > 0
    segments.close()


@pytest.mark.parametrize(
    ("device", "executor", "layers", "compiled"),
    [
        ("cuda", None, nn.Linear, True),
        ("cuda", None, nn.Conv2d, False),  # timed first: its layers may be faster
        ("cuda", "inductor", nn.Conv2d, True),
        ("cuda", "graph", nn.Linear, False),
        ("cpu", "inductor", nn.Linear, False),
    ],
)
def test_inductor_is_woken_where_it_is_sure_to_compile_for_a_gpu(
    device: str, executor: str | None, layers: Any, compiled: bool
) -> None:
    model = nn.Sequential(layers(4, 4, 1), layers(4, 4, 1))
    workload: Any = SimpleNamespace(device=torch.device(device), model=model)
    assert surely_compiled(workload, executor) is compiled


def test_inductor_can_be_woken_often(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[int] = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: woken.append(1))
    ahead.wake_inductor()
    ahead.wake_inductor()
    assert woken == [1, 1]
    monkeypatch.delattr(async_compile, "maybe_warm_pool")
    ahead.wake_inductor()


def test_a_forward_ahead_of_a_plans_first_run_changes_nothing(
    workload: memfit.Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = memfit.profile(workload, executor="graph")
    plan = make_plan(profile, Goal(strategy="optimal", activation_reduction=0.5))
    asked: list[int] = []

    def count(segments: CompiledSegments) -> int:
        asked.append(1)
        return 2

    expected = learn_variants(workload, profile, plan)
    monkeypatch.setattr(CompiledSegments, "worker_count", property(count))
    learned = learn_variants(workload, profile, plan)
    assert asked and _memory(learned) == _memory(expected)


def _memory(profile: Profile | None) -> list[Any]:
    assert profile is not None
    variants = [v for known in profile.known for v in known.variants]
    return [(v.saved, v.held_bytes, v.forward_peak_bytes, v.backward_peak_bytes) for v in variants]
