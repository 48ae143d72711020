"""Every decision of a plan is executed: what is said to be kept is handed over, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit.fitted import Fitted
from memfit.ir.plan import KEEP, RECOMPUTE, Plan
from memfit.ir.profile import Profile
from memfit.measure.step import run_step, untouched
from memfit.runtime.apply import Applied, plan_code, plan_engine
from memfit.runtime.calls import Forward, Route, routed
from memfit.runtime.compile.compiled import compiled_segments
from memfit.runtime.inplace import inplace_off
from memfit.runtime.recompute import Recompute
from memfit.workload import Workload

pytestmark = pytest.mark.slow


@dataclass
class Seen:
    """What one call of a segment showed: tensors by name, and the memory autograd saved."""

    named: dict[str, int] = field(default_factory=dict)  # node -> address
    saved: set[int] = field(default_factory=set)


class _Audit:
    """An engine that notes, per call, what its compiled code hands over."""

    def __init__(self, inner: Recompute) -> None:
        self.inner, self.calls = inner, dict[int, Seen]()
        self.current: Seen | None = None
        self.alive: list[torch.Tensor] = []  # so that no address is used twice

    @property
    def replaying(self) -> bool:
        return self.inner.replaying

    def begin(self) -> None:
        self.inner.begin()

    def end(self) -> None:
        self.inner.end()

    def __call__(self, index: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if self.replaying:
                return forward(*args, **kwargs)
            before, self.current = self.current, self.calls.setdefault(index, Seen())
            try:
                with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor):
                    return forward(*args, **kwargs)
            finally:
                self.current = before

        return self.inner(index, noted, args, kwargs)

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        if self.current is not None:
            self.current.named[name] = self._address(tensor)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.current is not None:
            self.current.saved.add(self._address(tensor))
        return tensor

    def _address(self, tensor: torch.Tensor) -> int:
        self.alive.append(tensor.detach())
        return tensor.untyped_storage().data_ptr()


@contextmanager
def _audited(workload: Workload, plan: Plan) -> Iterator[_Audit]:
    """The plan at work under an audit."""
    audit = _Audit(plan_engine(plan, workload.model))
    route = Route(plan.route, plan.model_calls)
    with (
        inplace_off(workload.model, plan.inplace_off),
        routed(workload.model, route, audit, plan_code(plan)),
        compiled_segments(plan.executor).watched(audit.watch),
    ):
        yield audit


def _check_decisions(workload: Workload, profile: Profile, plan: Plan) -> tuple[int, int]:
    """Compare every decision with what a step does; how many tensors were kept, recomputed."""
    with untouched(workload):
        with Applied(plan, workload.model):
            run_step(workload)  # compiled by now
        with _audited(workload, plan) as audit:
            workload.compute_loss()
            own = {
                tensor.untyped_storage().data_ptr()
                for tensor in (*workload.model.parameters(), *workload.model.buffers())
            }
    graphs = {graph.key: graph for graph in profile.graphs}
    kept = recomputed = 0
    for index, segment in enumerate(plan.segments):
        if segment.variant is None or segment.run is not None:
            continue
        variant = plan.variants[segment.variant]
        graph, seen = graphs[variant.graph], audit.calls[index]
        outputs = {graph.nodes[n].name for n in graph.outputs}
        shared = {seen.named[name] for name in outputs if name in seen.named}
        for activation in variant.activations:
            name = activation.name
            if activation.decision == KEEP:
                kept += 1
                assert seen.named[name] in seen.saved, f"{segment.name}: {name} is not kept"
            else:
                assert activation.decision == RECOMPUTE
                recomputed += 1
                assert name in outputs or name not in seen.named, f"{segment.name}: {name} is kept"
        # Beside what was decided on, autograd holds parameters and states of generators alone.
        decided = {seen.named[a.name] for a in variant.activations if a.decision == KEEP}
        undecided = (set(seen.named.values()) & seen.saved) - decided - own - shared
        names = {name for name, address in seen.named.items() if address in undecided}
        assert not names, f"{segment.name} keeps {names} without a decision"
        assert {a.name for a in variant.activations if a.decision == KEEP} == set(variant.saved)
    return kept, recomputed


@pytest.mark.parametrize("share", [0.6, 0.3])
@pytest.mark.parametrize("profiled", ["transformers:gpt2", "transformers:resnet-50"], indirect=True)
def test_what_a_plan_says_is_what_the_compiled_segments_hand_over(
    profiled: Any, share: float
) -> None:
    smallest = memfit.plan(profiled.profile).minimum_feasible_bytes
    budget = max(profiled.budget(share), int(1.02 * smallest))
    plan = memfit.plan(profiled.profile, budget)
    partial = [s for s in plan.segments if s.decision == "partial"]
    assert partial
    kept, recomputed = _check_decisions(profiled.workload, profiled.profile, plan)
    assert kept > len(partial) and recomputed > len(partial)
    unplanned = plan.unplanned()
    kept_all, recomputed_none = _check_decisions(profiled.workload, profiled.profile, unplanned)
    assert kept_all > kept and recomputed_none < recomputed


@pytest.mark.parametrize("profiled", ["transformers:gpt2"], indirect=True)
@pytest.mark.parametrize("said", [KEEP, RECOMPUTE])
def test_a_plan_that_says_other_than_it_does_is_noticed(profiled: Any, said: str) -> None:
    plan = memfit.plan(profiled.profile, profiled.budget(0.5))
    number = next(s.variant for s in plan.segments if s.decision == "partial")
    rows = list(plan.variants[number].activations)
    at = next(i for i, row in enumerate(rows) if row.decision != said and "input" not in row.reason)
    rows[at] = replace(rows[at], decision=said)
    variants = list(plan.variants)
    variants[number] = replace(variants[number], activations=tuple(rows))
    with pytest.raises((AssertionError, KeyError), match=rows[at].name):
        _check_decisions(
            profiled.workload, profiled.profile, replace(plan, variants=tuple(variants))
        )


class _Mixed(nn.Module):
    """A block with layer-norm, convolution, batch-norm and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, 2 * width, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(2 * width)
        self.out = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.batch_norm(self.conv(self.norm(x).transpose(1, 2)))
        return x + self.out(self.dropout(F.gelu(y)).transpose(1, 2))


class _TiedText(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, width: int = 32, words: int = 50) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(_Mixed(width) for _ in range(4))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _tied_text(autocast: bool) -> Workload:
    def loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(words)
        return F.cross_entropy(logits.float().flatten(0, 1), words.flatten())

    torch.manual_seed(0)
    model = _TiedText()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Workload(model, loss, optimizer, torch.randint(50, (16, 32)))


def _numbers(
    workload: Workload, step: Callable[[Any], torch.Tensor], steps: int = 3
) -> list[torch.Tensor]:
    """Losses, then weights and buffers, of some steps from a fixed seed."""
    torch.manual_seed(7)
    losses = [step(workload.batch) for _ in range(steps)]
    return [*losses, *workload.model.state_dict().values()]


def _fit_that_runs_again(workload: Workload, *operators: str) -> Fitted:
    """A fit whose plan runs these operators again inside of segments.

    It is planned as if each operator took a second and whole segments far longer: by measured
    seconds, the plan would be another one on each machine and each time.
    """
    measured = memfit.profile(workload)
    graphs = (
        replace(graph, nodes=tuple(replace(node, seconds=1.0) for node in graph.nodes))
        for graph in measured.graphs
    )
    calls = (replace(call, recompute_s=100.0) for call in measured.call_times)
    priced = replace(measured, graphs=tuple(graphs), call_times=tuple(calls))
    plan = memfit.plan(priced, "60%")
    fitted = memfit.fit_workload(workload, plan=plan, profiled=measured, steps=1)
    seen = " ".join(_run_again(fitted))
    assert all(operator in seen for operator in operators), f"only {seen} run again"
    return fitted


def _run_again(fitted: Fitted) -> set[str]:
    """The operators that partly recomputed segments run again."""
    graphs = {graph.key: graph for graph in fitted.profile.graphs}
    found: set[str] = set()
    for variant in (fitted.plan.variants[s.variant] for s in fitted.plan.segments if s.variant):
        graph = graphs[variant.graph]
        again = graph.recomputed(frozenset(graph.index[name] for name in variant.saved))
        found |= {graph.nodes[n].op for n in again}
    return found


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_dropout_batch_norm_autocast_and_tied_weights_train_bit_for_bit(autocast: bool) -> None:
    planned, unplanned, plain = (_tied_text(autocast) for _ in range(3))
    with _fit_that_runs_again(planned, "batch_norm", "dropout") as fitted:
        assert fitted.result.numerics.bitwise_vs_unplanned
        actual = _numbers(planned, fitted.step)
    kept, recomputed = _check_decisions(planned, fitted.profile, fitted.plan)
    assert kept and recomputed
    with Applied(fitted.plan.unplanned(), unplanned.model):
        expected = _numbers(unplanned, lambda batch: run_step(unplanned))
    assert len(actual) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
    eager = _numbers(plain, lambda batch: run_step(plain))
    tolerance = 2e-2 if autocast else 1e-5
    torch.testing.assert_close(actual[0], eager[0], rtol=tolerance, atol=0)
