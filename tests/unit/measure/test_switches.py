"""Switches of models that work against a plan are off in the step, and on again afterwards."""

from __future__ import annotations

import pytest
import torch

import memfit
from memfit.measure.switches import CACHE_OFF, CHECKPOINTING_OFF
from memfit.workload import Workload


def _llama() -> Workload:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    assert config.use_cache, "as a user gets it"
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(64, (2, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {"input_ids": tokens, "labels": tokens}
    return Workload(model, lambda model, batch: model(**batch).loss, optimizer, batch)


@pytest.mark.parametrize("executor", ["module", "graph"])
def test_a_model_with_a_cache_for_generation_is_fitted(executor: str) -> None:
    """Recomputed blocks put their keys into the cache once more, and attended to both."""
    workload = _llama()
    config = workload.model.config
    with memfit.fit_workload(workload, "90%", executor=executor, steps=1) as fitted:
        assert fitted.result.numerics.bitwise_vs_unplanned
        assert CACHE_OFF in fitted.result.notes
        assert not config.use_cache, "off while the plan is at work"
        fitted.step(workload.batch)
    assert config.use_cache, "and as it was before"


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_checkpoints_by_itself_is_fitted(reentrant: bool) -> None:
    """What was saved inside the model's own checkpoints was not found: KeyError."""
    workload = _llama()
    model = workload.model
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with memfit.fit_workload(workload, "90%", executor="graph", steps=1) as fitted:
        assert fitted.result.numerics.bitwise_vs_unplanned
        assert CHECKPOINTING_OFF in fitted.result.notes
        assert not model.is_gradient_checkpointing
        fitted.step(workload.batch)
    assert model.is_gradient_checkpointing
