"""Batches of many lengths on a GPU, by fused code: right, within the budget, few compilations."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit.measure.memory import measure_peak, memory_cap
from memfit.runtime.compile.compiled import compiled_segments
from memfit.runtime.compile.shapes import STATIC_SHAPES, SYMBOLIC_COMPILATIONS
from memfit.workload import Workload

ROWS, LENGTH, WORDS = 16, 512, 4000


def _llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        num_hidden_layers=4,
        hidden_size=256,
        intermediate_size=688,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).train().cuda()


def _next_word(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _tokens(length: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (ROWS, length), device="cuda")


def _plain_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Without dropout or batch norm an evaluation, which no plan touches, gives the same loss."""
    model.eval()
    with torch.no_grad():
        loss = _next_word(model, batch)
    model.train()
    return loss


def _no_replan(*_: Any) -> Any:
    raise AssertionError("planned again")


def test_twenty_random_lengths() -> None:
    model = _llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = Workload(model, _next_word, optimizer, _tokens(LENGTH))
    segments = compiled_segments("inductor")
    with memfit.fit_workload(workload, "75%", executor="inductor", steps=1) as fitted:
        fitted._replan = _no_replan
        planned = {s.variant for s in fitted.plan.segments} - {None}
        assert any(not fitted.plan.variants[v].unplanned for v in planned), "the budget binds"
        budget = fitted.plan.budget_bytes
        assert budget is not None
        before = segments.compilations
        for length in random.Random(1).sample(range(8, LENGTH), 20):
            batch = _tokens(length)
            fitted.step(batch)  # it may compile, which takes memory of its own
            expected = _plain_loss(model, batch)
            torch.cuda.empty_cache()
            losses: list[torch.Tensor] = []
            sized = replace(workload, batch=batch)
            with memory_cap(workload.device, budget):
                peak = measure_peak(sized, lambda b=batch, got=losses: got.append(fitted.step(b)))
            assert peak.reserved_bytes <= budget
            assert peak.retries == 0
            torch.testing.assert_close(losses[0], expected, rtol=1e-4, atol=1e-4)
        compiled = segments.compilations - before
        assert compiled <= len(planned) * (STATIC_SHAPES + SYMBOLIC_COMPILATIONS)
        assert fitted.notes == ()
