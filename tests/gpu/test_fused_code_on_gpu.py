"""What inductor makes of a plan's graphs on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import memfit
from memfit.api import fit_workload
from memfit.ir.step_graph import LOSS
from memfit.measure.step import run_backward, untouched
from memfit.planning.simulate import Simulator
from memfit.runtime.apply import Applied
from memfit.targets import resolve_target

FEW = {"n_layer": "4"}
RUNS = 4
# A plan of a GPT-2-large block: both norms hand over what they normalised, and what they scale by.
HANDED_OVER = (
    "mul convert_element_type_1 addmm getitem_5 getitem_6 getitem_11 getitem_12 gt mul_4 "
    "convert_element_type_12 addmm_2 gt_1 div div_1"
).split()


def test_a_norm_that_hands_over_what_it_made_repeats_itself(
    blocks_by: Callable[..., memfit.Plan],
) -> None:
    """One loop of the norm's kernel reads what an earlier one stored: it must wait for it."""
    workload = resolve_target(
        "transformers:gpt2-large", device="cuda", batch=8, seq=1024, dtype="bf16", overrides=FEW
    )
    profile = memfit.profile(workload, executor="inductor")

    def handing_over(simulator: Simulator, graph: int) -> int:
        index = profile.graphs[graph].index
        if not set(HANDED_OVER) <= set(index):
            pytest.skip(f"torch {torch.__version__} names the operators of the block otherwise")
        return simulator.offer(graph, [index[name] for name in HANDED_OVER])

    plan = blocks_by(profile, handing_over)

    def loss(plan: memfit.Plan) -> float:
        with untouched(workload), Applied(plan, workload.model):
            made = workload.compute_loss()
            run_backward(workload, made)
            return made.item()

    losses = {loss(plan) for _ in range(RUNS)}
    assert len(losses) == 1
    assert abs(losses.pop() - loss(plan.unplanned())) < 1e-3


def test_a_fused_loss_holds_the_logits_and_their_gradient_alone() -> None:
    """Eagerly three float32 copies of bf16 logits; here they and their gradient, both bf16."""
    workload = resolve_target(
        "transformers:gpt2", device="cuda", batch=8, seq=512, dtype="bf16", overrides=FEW
    )
    profile = memfit.profile(workload, executor="inductor")
    eager = memfit.profile(workload, executor="module")
    assert profile.graph.calls[-1].module == LOSS and not profile.uncaptured
    assert profile.baseline is not None and eager.baseline is not None
    logits = 8 * 512 * 50257
    saved = eager.baseline.peak_bytes - profile.baseline.peak_bytes
    assert saved > (3 * 4 - 2 * 2) * logits * 0.9
    assert profile.step_s < 1.05 * eager.step_s
    made = fit_workload(workload, "95%", executor="inductor", profiled=profile)
    result = made.result
    made.undo()
    assert result.numerics.agree
    assert abs(result.measured.peak_bytes / result.predicted.peak_bytes - 1) < 0.03
