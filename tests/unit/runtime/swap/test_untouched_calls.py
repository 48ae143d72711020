"""A plan that moves little leaves the rest of the step alone: no hooks, no wrapped forwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memfit.capture.profile import profile_workload
from memfit.ir.plan import OFFLOAD, Plan
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime.apply import Applied
from memfit.runtime.compile.compiled import compiled_segments
from memfit.runtime.swap.engine import Swap
from memfit.workload import Workload

STEPS = 2


def _moving(workload: Workload, call: int, point: int, executor: str = "module") -> Plan:
    """Everything is kept but what one call saves: gone at call `point`, back with its backward."""
    plan = make_plan(profile_workload(workload, executor=executor, rounds=1), Goal(strategy="none"))
    segments, variants = list(plan.segments), list(plan.variants)
    number = segments[call].variant
    if number is not None:
        variants.append(replace(variants[number], offloaded=variants[number].saved))
        number = len(variants) - 1
    segments[call] = replace(
        segments[call], variant=number, release=point, prefetch=point, decision=OFFLOAD
    )
    return replace(
        plan,
        segments=tuple(segments),
        variants=tuple(variants),
        host_bytes=2**20,
        smallest_move_bytes=1,
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls that come to an engine that moves memory."""
    calls: list[int] = []
    plain = Swap.__call__

    def noted(self: Swap, index: int, *rest: Any) -> Any:
        calls.append(index)
        return plain(self, index, *rest)

    monkeypatch.setattr(Swap, "__call__", noted)
    return calls


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The tensors that were saved under a hook."""
    sizes: list[torch.Size] = []
    plain = Swap._pack

    def noted(self: Swap, moves: Any, named: Any, tensor: torch.Tensor) -> Any:
        sizes.append(tensor.size())
        return plain(self, moves, named, tensor)

    monkeypatch.setattr(Swap, "_pack", noted)
    return sizes


def _saved_by(block: nn.Module, x: torch.Tensor) -> int:
    count = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x.requires_grad_())
    return count


@pytest.mark.parametrize("kind", ["Stack", "Reused"])
def test_only_the_call_that_moves_runs_under_hooks(
    zoo: SimpleNamespace,
    run_numbers: Callable[..., Any],
    assert_same: Callable[..., None],
    asked: list[int],
    packed: list[torch.Size],
    kind: str,
) -> None:
    expected = run_numbers(zoo.workload(getattr(zoo, kind)), STEPS)
    workload = zoo.workload(getattr(zoo, kind))
    plan = _moving(workload, call=1, point=3)
    blocks = workload.model.blocks
    saved = _saved_by(blocks[0], torch.randn(4, 6, 16))
    under: list[tuple[int, bool]] = []

    def note(number: int) -> Callable[..., None]:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks
        return lambda *_: under.append((number, hooks(True) is not None))

    for number, block in enumerate(blocks):
        block.up.register_forward_hook(note(number))
    with Applied(plan, workload.model) as applied:
        wrapped = {n for n, m in workload.model.named_modules() if "forward" in m.__dict__}
        assert wrapped == {"", "blocks.0", "blocks.2", "head"}
        actual = run_numbers(workload, STEPS)
        assert applied.swap is not None
        statistics = applied.swap.statistics()
    rounds = 2 if kind == "Reused" else 1
    # Call 1 is the first one of blocks.0.
    assert under == [(n, n == 0 and r == 0) for r in range(rounds) for n in range(4)] * STEPS
    assert asked == [1, 3, len(plan.segments) - 1] * STEPS
    assert len(packed) == saved * STEPS > 0
    assert statistics.moves == statistics.retrievals > 0
    assert statistics.steps == STEPS and statistics.late == statistics.stayed == 0
    assert_same(actual, expected)


def test_captured_calls_that_move_nothing_run_their_code_without_the_engine(
    zoo: SimpleNamespace,
    run_numbers: Callable[..., Any],
    assert_same: Callable[..., None],
    asked: list[int],
) -> None:
    expected = run_numbers(zoo.workload(zoo.Stack), STEPS)
    workload = zoo.workload(zoo.Stack)
    plan = _moving(workload, call=2, point=3, executor="graph")
    captured = sum(segment.variant is not None for segment in plan.segments)
    compiled = compiled_segments("graph")
    with Applied(plan, workload.model) as applied:
        before = compiled.runs
        actual = run_numbers(workload, STEPS)
        assert compiled.runs - before == captured * STEPS
        assert applied.swap is not None and applied.swap.statistics().moves > 0
    assert captured >= 4 and asked == [2, 3, 5] * STEPS
    assert_same(actual, expected)


def test_a_plan_that_moves_and_recomputes_nothing_wraps_the_model_alone(
    zoo: SimpleNamespace,
) -> None:
    workload = zoo.workload(zoo.Stack)
    plan = _moving(workload, call=1, point=3).unplanned()
    with Applied(plan, workload.model):
        assert [n for n, m in workload.model.named_modules() if "forward" in m.__dict__] == [""]
        workload.compute_loss().backward()


def test_a_step_that_never_calls_the_model_ends_with_its_last_call(
    zoo: SimpleNamespace, run_numbers: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    def parts(model: Any, batch: torch.Tensor) -> torch.Tensor:
        x = model.stem(batch)
        for block in model.blocks:
            x = block(x)
        return model.head(x).square().mean()

    expected = run_numbers(zoo.workload(zoo.Stack, loss=parts), STEPS)
    workload = zoo.workload(zoo.Stack, loss=parts)
    num_calls = 6
    plan = _moving(workload, call=1, point=num_calls)
    assert len(plan.segments) == num_calls
    with Applied(plan, workload.model) as applied:
        actual = run_numbers(workload, STEPS)
        assert applied.swap is not None
        statistics = applied.swap.statistics()
    assert statistics.steps == STEPS
    assert statistics.moves == statistics.retrievals > 0
    assert statistics.late == statistics.stayed == 0, "all went with the end and came with it"
    assert_same(actual, expected)
