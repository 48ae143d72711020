"""Traced peaks beside those measured on the CPU, with the CPU's own operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memfit.estimating.estimate import estimate
from memfit.measure.memory import measure_peak
from memfit.measure.step import run_step
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
