"""Profiling where the plain step runs out of memory: simulated, and nothing left behind."""

from __future__ import annotations

import pytest
import torch

import memfit
from memfit.capture.seconds import StepTimes
from memfit.planning.budget import baseline_peak_bytes
from memfit.targets import resolve_target

FIELDS = {"n_layer": "4", "n_embd": "32", "n_head": "2", "n_ff": "128", "vocab_size": "50"}


def _workload() -> memfit.Workload:
    return resolve_target("encoder", batch=8, seq=32, overrides=FIELDS)


def test_the_plain_step_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = memfit.profile(_workload())
    workload = _workload()

    def out_of_memory(times: StepTimes) -> None:
        times.workload.compute_loss().backward()  # as far as it gets: gradients are there
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(StepTimes, "_plain_step", out_of_memory)
    profile = memfit.profile(workload)
    assert profile.baseline is None
    assert measured.baseline is not None
    assert baseline_peak_bytes(profile) == measured.baseline.peak_bytes
    assert profile.step_s > 0
    (note,) = [n for n in profile.notes if n.startswith("the plain step does not fit")]
    assert "Live then: " in note and " parameters, " in note and " gradients" in note
    assert all(p.grad is None for p in workload.model.parameters())
    with memfit.fit_workload(workload, "80%", steps=1) as fitted:
        assert not fitted.result.baseline.measured
        assert fitted.result.measured.time_ratio is None
        assert fitted.result.measured.peak_bytes <= fitted.result.budget_bytes
