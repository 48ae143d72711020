"""Other processes compile what capture and the first run of a plan meet; numbers stay theirs."""

from __future__ import annotations

from typing import Any

import pytest

import memfit
from memfit.capture import captured
from memfit.capture.find import find_segments
from memfit.capture.learn import learn_variants
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
    assert segments.made_ahead == {(graph.key, None) for graph in found.graphs}
    assert found.graphs and not segments.workers.most and not ahead._failed
    for graph in found.graphs:
        assert sum(node.seconds for node in graph.nodes) > 0
    segments.close()


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
