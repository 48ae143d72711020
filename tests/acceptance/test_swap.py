"""Offloading on the CPU, where the host is a second buffer: every workload with everything moved.

The same numbers bit for bit, the peak that was predicted, and each tensor out and back once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memfit
from memfit.fitted import Fitted
from memfit.ir.plan import OFFLOAD
from memfit.report.decisions import decision_rows

pytestmark = pytest.mark.slow

PREDICTION = 0.01  # as without copies: on the CPU every allocation is recorded


def _fit(profiled: Any, budget: int | None, **options: Any) -> Fitted:
    return memfit.fit_workload(
        profiled.workload, budget, profiled=profiled.profile, steps=2, **options
    )


def _check(fitted: Fitted) -> None:
    result, swap = fitted.result, fitted.result.swap
    assert result.numerics.bitwise_vs_unplanned, result.numerics
    assert abs(result.peak_error) <= PREDICTION
    assert swap is not None and swap.moves > 0
    assert swap.moves == swap.retrievals + swap.stayed
    assert swap.host_highest_bytes <= swap.host_bytes
    assert torch.isfinite(fitted.workload.compute_loss())


def test_everything_on_the_host_gives_the_same_numbers(profiled: Any) -> None:
    with _fit(profiled, None, strategy="swap") as fitted:
        _check(fitted)
        plan, result = fitted.plan, fitted.result
        assert plan.recomputed_bytes == 0
        assert plan.offloaded_bytes >= 0.9 * (plan.offloaded_bytes + plan.kept_bytes)
        saved = result.baseline.peak_bytes - result.baseline.static_bytes
        freed = result.baseline.peak_bytes - result.measured.peak_bytes
        assert freed >= 0.5 * saved


def test_everything_on_the_host_around_plain_modules(profiled_by_module: Any) -> None:
    with _fit(profiled_by_module, None, strategy="swap") as fitted:
        _check(fitted)
        assert all(s.decision == OFFLOAD for s in fitted.plan.segments if s.saved_bytes > 10**5)


@pytest.mark.parametrize("target", ["transformers:gpt2", "transformers:resnet-50"])
@pytest.mark.parametrize("strategy", ["optimal", "mutwo"])
def test_recompute_and_offload_together_hold_a_budget(
    target: str, strategy: str, profiled_of: Any
) -> None:
    profiled = profiled_of(target)
    budget = profiled.budget(0.5)
    with _fit(profiled, budget, strategy=strategy, allow="recompute,offload") as fitted:
        _check(fitted)
        assert fitted.result.measured.peak_bytes <= budget
        decisions = {row["decision"] for row in decision_rows(fitted.plan)}
        assert {"RETAINED", "SWAP"} <= decisions <= {"RETAINED", "SWAP", "RECOMPUTE"}
