"""Batches of other shapes than the planned one: right, within the budget, few compilations."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit.fitted import Fitted
from memfit.ir.profile import CopyRates
from memfit.measure.memory import measure_peak
from memfit.runtime.compile import shapes
from memfit.runtime.compile.choice import OtherGraph
from memfit.runtime.compile.compiled import CompiledSegments, compiled_segments
from memfit.runtime.compile.shapes import STATIC_SHAPES, SYMBOLIC_COMPILATIONS, sizes_of
from memfit.workload import Workload

ROWS, LENGTH, WORDS = 4, 48, 50
Step = Callable[[torch.Tensor], torch.Tensor]


def _llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).train()


def _next_word(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _tokens(length: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randint(0, WORDS, (rows, length))


def _same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def _plain(model: nn.Module, loss_fn: Any) -> Step:
    """Train a twin of the model without memfit."""
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(twin, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step.model = twin  # type: ignore[attr-defined]
    return step


@pytest.fixture(scope="module")
def llama() -> Iterator[tuple[Fitted, Step]]:
    """A fitted Llama and the same one trained plainly."""
    model = _llama()
    plain = _plain(model, _next_word)
    workload = Workload(
        model, _next_word, torch.optim.SGD(model.parameters(), lr=0.1), _tokens(LENGTH)
    )
    with memfit.fit_workload(workload, "70%", executor="graph", steps=1) as fitted:
        yield fitted, plain


def _no_replan(*_: Any) -> Any:
    raise AssertionError("planned again")


def test_twenty_random_lengths(llama: tuple[Fitted, Step]) -> None:
    fitted, plain = llama
    fitted._replan = _no_replan
    segments = compiled_segments("graph")
    planned = {s.variant for s in fitted.plan.segments} - {None}
    assert any(not fitted.plan.variants[v].unplanned for v in planned), "the budget binds"
    lengths = random.Random(1).sample(range(2, LENGTH), 20)
    compiled: list[int] = []
    for length in lengths:
        batch, before = _tokens(length), segments.compilations
        for _ in range(2):  # the second time nothing is compiled, which would take memory too
            losses: list[torch.Tensor] = []
            sized = replace(fitted.workload, batch=batch)
            peak = measure_peak(sized, lambda b=batch, got=losses: got.append(fitted.step(b)))
            _same(losses[0], plain(batch))
            _same(fitted.workload.model.state_dict(), plain.model.state_dict())
        compiled.append(segments.compilations - before)
        assert peak.bytes <= fitted.plan.budget_bytes
    # Each pair of graph and variant: a second shape of its own, then one code for all.
    assert compiled[0] == compiled[1] == len(planned)
    assert not any(compiled[2:])
    assert sum(compiled) <= len(planned) * (STATIC_SHAPES + SYMBOLIC_COMPILATIONS)
    assert fitted.notes == ()


def test_what_waits_on_the_host_does_so_for_every_length() -> None:
    model = _llama()
    plain = _plain(model, _next_word)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = Workload(model, _next_word, optimizer, _tokens(LENGTH))
    # Copies that start at once: then no tensor is too small to be moved, however short the batch.
    rates = CopyRates(1e10, 1e10, latency_s=0.0, drag=1.0)
    profile = replace(memfit.profile(workload, executor="graph"), copy=rates)
    options = {"strategy": "swap", "profiled": profile, "steps": 1}
    with memfit.fit_workload(workload, None, **options) as fitted:
        moved = _moves(fitted, plain, LENGTH)
        assert moved > 10
        for length in (40, 33, 24, 17):
            assert _moves(fitted, plain, length) == moved


def _moves(fitted: Fitted, plain: Step, length: int) -> int:
    """How many tensors one step on a batch of this length moves."""
    swap = fitted.applied.swap
    assert swap is not None
    swap.reset_statistics()
    batch = _tokens(length)
    _same(fitted.step(batch), plain(batch))
    _same(fitted.workload.model.state_dict(), plain.model.state_dict())
    return swap.statistics().moves


@pytest.mark.parametrize("rows, length", [(1, LENGTH), (ROWS, 1), (1, 1), (1, 7)])
def test_a_size_of_one(llama: tuple[Fitted, Step], rows: int, length: int) -> None:
    fitted, plain = llama
    fitted._replan = _no_replan
    batch = _tokens(length, rows)
    _same(fitted.step(batch), plain(batch))
    peak = measure_peak(replace(fitted.workload, batch=batch), lambda: fitted.step(batch))
    plain(batch)
    _same(fitted.workload.model.state_dict(), plain.model.state_dict())
    assert peak.bytes <= fitted.plan.budget_bytes


def test_a_larger_batch_is_planned_once_and_switching_compiles_nothing(
    llama: tuple[Fitted, Step], caplog: pytest.LogCaptureFixture
) -> None:
    fitted, plain = llama
    segments = compiled_segments("graph")
    replans = []
    model = fitted.workload.model
    workload = replace(fitted.workload, batch=_tokens(12))
    fitted.undo()
    with memfit.fit_workload(workload, 10**9, strategy="all", steps=1) as small:
        replan = small._replan
        small._replan = lambda larger: (replans.append(1), replan(larger))[1]
        batches = [_tokens(12), _tokens(20), _tokens(12), _tokens(3, rows=ROWS + 1)]
        with caplog.at_level(logging.WARNING, "memfit"):
            for batch in batches:
                _same(small.step(batch), plain(batch))
        assert len(replans) == 2
        assert sum("planning again" in r.message for r in caplog.records) == 2
        before = segments.compilations
        for batch in batches * 2:
            _same(small.step(batch), plain(batch))
            assert small.result.workload["batch"] == small.plan.workload["batch"]
        assert segments.compilations == before and len(replans) == 2
        _same(model.state_dict(), plain.model.state_dict())


class Net(nn.Module):
    """Two blocks with dropout and batch norm, so that running twice would show."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = nn.Conv1d(8, 16, 1), nn.BatchNorm1d(16)
            self.down, self.dropout = nn.Conv1d(16, 8, 1), nn.Dropout(0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.dropout(self.down(torch.tanh(self.norm(self.up(x)))))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Net.Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("bound", [None, 0])
def test_dropout_and_batch_norm_with_and_without_symbolic_code(
    bound: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Past the bound segments run as their modules do, and it is said once."""
    if bound is not None:
        monkeypatch.setattr(shapes, "SYMBOLIC_COMPILATIONS", bound)
    torch.manual_seed(0)
    model, segments = Net(), CompiledSegments("graph")
    twin = copy.deepcopy(model)
    block = model.blocks[0]
    segments(block.forward, (torch.randn(4, 8, 6, requires_grad=True),), {})
    twin.blocks[0](torch.randn(4, 8, 6))
    model.load_state_dict(twin.state_dict())
    graph = segments.graphs[str(segments.last_key)]
    saved = [n.name for n in graph.nodes if n.role == "input" and n.can_save]
    for one in model.blocks:
        one.forward = segments.bind(one.forward, key=graph.key, saved=saved)
    with caplog.at_level(logging.WARNING, "memfit"):
        for length in (6, 5, 4, 3, 2, 4, 6, 1):
            states = []
            for net in (model, twin):
                torch.manual_seed(length)
                net.zero_grad()
                x = torch.randn(4, 8, length, requires_grad=True)
                net(x).backward()
                gradients = {n: p.grad for n, p in net.named_parameters()}
                states.append((x.grad, gradients, net.state_dict(), torch.get_rng_state()))
            _same(*states)
    said = [r.message for r in caplog.records if r.name.startswith("memfit")]
    assert segments.notes([graph.key]) == said
    assert len(said) == (1 if bound == 0 else 0)
    assert all("eagerly, recomputed as a whole" in line for line in said)
    segments.close()


@pytest.mark.slow
def test_inductor_runs_many_shapes_by_one_code(zoo: SimpleNamespace) -> None:
    torch.manual_seed(0)
    segments, block = CompiledSegments("inductor"), zoo.Block(dropout=0.0)
    with segments.measuring():
        segments(block.forward, (torch.randn(6, 4, 16, requires_grad=True),), {})
    graph = segments.graphs[str(segments.last_key)]
    saved = [n.name for n in graph.nodes if n.role == "input" and n.can_save]
    run = segments.bind(block.forward, key=graph.key, saved=saved)
    compiled = []
    for length in (6, 5, 4, 3, 2):
        x = torch.randn(length, 4, 16, requires_grad=True)
        twin, before = x.detach().clone().requires_grad_(), segments.compilations
        run(x).square().sum().backward()
        block(twin).square().sum().backward()
        torch.testing.assert_close(x.grad, twin.grad)
        compiled.append(segments.compilations - before)
    assert compiled == [1, 1, 1, 0, 0] and segments.notes([graph.key]) == []
    segments.close()


def test_another_mode_is_no_other_shape() -> None:
    """The planned shape with other operators is another model: refused, not guessed."""
    segments = CompiledSegments("graph")
    block, x = Net.Block(), torch.randn(4, 8, 6, requires_grad=True)
    segments(block.forward, (x,), {})
    graph = segments.graphs[str(segments.last_key)]
    run = segments.bind(block.forward, key=graph.key)
    run(x)
    block.dropout.p = 0.0
    with pytest.raises(OtherGraph, match="no longer runs the operators"):
        run(x)
    segments.close()


def test_sizes_are_found_wherever_tensors_are(zoo: SimpleNamespace) -> None:
    x = torch.zeros(2, 3)
    cargo = zoo.Cargo(hidden=x, scale=0.5)
    found = sizes_of((x, [x, (x, 7)]), {"more": {"deep": x}, "cargo": cargo, "word": "no"})
    assert found == (x.shape, x.shape, x.shape, 7, x.shape, x.shape)
