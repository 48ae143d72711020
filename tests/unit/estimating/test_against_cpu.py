"""Traced peaks beside those measured on the CPU, with the CPU's own operators."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import memfit
from memfit.estimating.estimate import estimate
from memfit.estimating.needs import runs_by_length
from memfit.measure.memory import measure_peak
from memfit.measure.step import run_step, untouched
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime.apply import Applied
from memfit.targets import resolve_target

LAYERS = {"num_hidden_layers": "2"}
SMALL_ENCODER = {"n_layer": "2", "n_embd": "128", "n_ff": "512", "vocab_size": "500"}
TARGETS: dict[str, dict[str, Any]] = {
    "encoder": {"batch": 16, "seq": 128, "overrides": SMALL_ENCODER},
    "transformers:gpt2": {"batch": 4, "seq": 64, "overrides": {"n_layer": "2"}},
    "transformers:bert-base": {"batch": 4, "seq": 64, "overrides": LAYERS},
    "transformers:llama-160m": {"batch": 4, "seq": 64, "dtype": "bf16", "overrides": LAYERS},
    "transformers:resnet-50": {"batch": 2},
    "transformers:vit-base": {"batch": 2, "overrides": LAYERS},
}


@pytest.mark.parametrize("target", TARGETS)
def test_the_traced_peak_is_the_measured_one(target: str) -> None:
    if target.startswith("transformers:"):
        pytest.importorskip("transformers")
    workload = resolve_target(target, **TARGETS[target])
    run_step(workload)
    measured = measure_peak(workload, lambda: run_step(workload)).bytes
    named = estimate(target, as_on_cuda=False, **TARGETS[target])
    assert named.peak_bytes == pytest.approx(measured, rel=0.05)
    copied = estimate(workload, as_on_cuda=False)
    assert copied.peak_bytes == named.peak_bytes
    assert sum(named.categories.values()) == named.peak_bytes == named.needs.plain_bytes


def test_recompute_in_runs_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of each length by themselves; what a replay takes on the way is not traced."""
    options: dict[str, Any] = {
        "batch": 8,
        "seq": 128,
        "overrides": SMALL_ENCODER | {"n_layer": "8"},
    }
    workload = resolve_target("encoder", **options)
    profile = memfit.profile(workload, executor="module")
    for place, length in enumerate((1, 2)):
        plan = make_plan(profile, Goal(strategy="interval", interval=length))
        with untouched(workload), Applied(plan, workload.model):
            run_step(workload)
            run_step(workload)
            measured = measure_peak(workload, lambda: run_step(workload)).bytes
        only = partial(_of_one_length, place)
        monkeypatch.setattr("memfit.estimating.estimate.runs_by_length", only)
        needs = estimate("encoder", as_on_cuda=False, **options).needs
        assert 0.93 * measured < needs.recompute_bytes < 1.01 * measured


def _of_one_length(place: int, chained: list[bool]) -> list[list[range]]:
    return [runs_by_length(chained)[place]]


def test_a_given_workload_is_left_as_it_was() -> None:
    workload = resolve_target("encoder", batch=2, seq=16, overrides=SMALL_ENCODER)
    before = [p.clone() for p in workload.model.parameters()]
    random = torch.get_rng_state()
    estimate(workload)
    assert all(map(torch.equal, before, workload.model.parameters()))
    assert torch.equal(random, torch.get_rng_state())
    assert not workload.optimizer.state
    assert all(group["foreach"] is None for group in workload.optimizer.param_groups)
    assert all(p.grad is None for p in workload.model.parameters())


def test_operators_are_the_cpus_again_afterwards() -> None:
    estimate("encoder", batch=2, seq=16, overrides=SMALL_ENCODER)
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    attended = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    assert "ForCpu" in type(attended.grad_fn).__name__
    assert "Mul" in type(torch.nn.functional.dropout(x).grad_fn).__name__
    with torch.autocast("cpu", dtype=torch.bfloat16):
        normed = torch.nn.functional.layer_norm(x.detach().bfloat16(), (4,))
    assert normed.dtype is torch.bfloat16
