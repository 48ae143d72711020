"""In fused code the cross-entropy is a segment, too: fewer copies of the logits, the same numbers.

Inductor compiles for some seconds here, so one small language model serves several tests.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memfit.api import fit_workload, profile
from memfit.fitted import Fitted
from memfit.ir.step_graph import LOSS
from memfit.measure.memory import measure_peak
from memfit.measure.step import run_step, untouched
from memfit.workload import Workload

pytestmark = pytest.mark.slow

ROWS, LENGTH, WORDS, WIDTH = 4, 32, 3000, 16
LOGITS_BYTES = ROWS * LENGTH * WORDS * 4
PLAIN = F.cross_entropy
Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    """A language model with its loss outside."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return _judged(F.cross_entropy, model, batch)


def _judged(cross_entropy: Any, model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, labels = batch
    logits = model(tokens).flatten(0, 1)
    return cross_entropy(logits, labels.flatten(), ignore_index=0, label_smoothing=0.1)


def _batch(rows: int = ROWS, length: int = LENGTH) -> Batch:
    return torch.randint(WORDS, (rows, length)), torch.randint(WORDS, (rows, length))


def _words() -> Workload:
    torch.manual_seed(0)
    model = Words()
    return Workload(model, _loss, torch.optim.SGD(model.parameters(), lr=0.1), _batch())


@pytest.fixture(scope="module")
def workload() -> Workload:
    return _words()


@pytest.fixture(scope="module")
def fitted(workload: Workload) -> Iterator[Fitted]:
    made = fit_workload(workload, "95%", executor="inductor", steps=3)
    yield made
    made.undo()


def _plain_peak_bytes(workload: Workload) -> int:
    with untouched(workload):
        return measure_peak(workload, lambda: run_step(workload)).bytes


def test_the_loss_is_the_last_segment_of_the_plan(fitted: Fitted) -> None:
    assert fitted.plan.segments[-1].module == LOSS
    assert fitted.profile.uncaptured == {}


def test_the_unplanned_step_holds_a_copy_of_the_logits_less(fitted: Fitted) -> None:
    assert fitted.result.baseline.peak_bytes < _plain_peak_bytes(_words()) - 0.9 * LOGITS_BYTES


def test_the_peak_is_the_predicted_one(fitted: Fitted) -> None:
    result = fitted.result
    assert result.measured.peak_bytes == pytest.approx(result.predicted.peak_bytes, rel=0.01)
    assert result.measured.peak_bytes <= result.budget_bytes
    assert result.numerics.agree


def test_steps_of_all_sizes_are_those_of_the_plain_loop(fitted: Fitted, workload: Workload) -> None:
    twin = copy.deepcopy(_words().model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    torch.manual_seed(1)
    for rows, length in ((ROWS, LENGTH), (ROWS, LENGTH), (3, LENGTH), (ROWS, 20), (ROWS, LENGTH)):
        batch = _batch(rows, length)
        expected = _judged(PLAIN, twin, batch)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(fitted.step(batch), expected.detach(), rtol=1e-5, atol=1e-6)
    for mine, its in zip(workload.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_undoing_puts_torchs_function_back(fitted: Fitted) -> None:
    assert F.cross_entropy is not PLAIN
    fitted.undo()
    assert F.cross_entropy is PLAIN


def test_a_bf16_language_model_keeps_no_float32_logits() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=WIDTH, n_head=2, vocab_size=WORDS, use_cache=False
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(tokens, labels=tokens).loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = Workload(model, loss, optimizer, _batch()[0])
    plain = _plain_peak_bytes(workload)
    found = profile(workload, executor="inductor")
    assert found.graph.calls[-1].module == LOSS and found.uncaptured == {}
    assert found.baseline is not None
    # Eagerly three float32 ones at once; here one in bf16 and its gradient.
    assert found.baseline.peak_bytes < plain - 1.8 * LOGITS_BYTES
