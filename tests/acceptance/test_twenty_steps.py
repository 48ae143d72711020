"""Twenty steps by each technique are those of the plain loop: clipped, accumulated, scheduled.

Begun again half way from a checkpoint; what a technique leaves behind loads into a plain optimizer,
which ends in the same place. Exact techniques bit for bit; those that add up in another order, or
step on the CPU, within TOLERANCE. Stepping in backward has tests/unit/test_in_backward.py.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import memfit
from memfit.fitted import Fitted
from memfit.ir.plan import Plan
from memfit.runtime.setup import Setup
from memfit.targets import resolve_target
from memfit.workload import Workload

STEPS, ACCUMULATE, CLIP = 20, 2, 0.5
TOLERANCE = 1e-5  # of a loss or a parameter; 4e-7 was seen
SHAPE = (8, 64)
SIZES = {"n_layer": "2", "n_embd": "32", "n_head": "2", "vocab_size": "200"}


@dataclass(frozen=True)
class Way:
    """A technique, and how a plan comes by it."""

    name: str
    exact: bool = True
    dropout: float = 0.1
    setup: bool = False  # of the loss or the optimizer


WAYS = [
    Way("recompute"),
    Way("offload"),
    Way("optimizer_offload", setup=True),
    Way("step_on_host", setup=True, exact=False),
    Way("tiled_loss", setup=True, exact=False),
    Way("microbatch", exact=False, dropout=0.0),  # parts draw other numbers than the whole
]


def build(way: Way) -> Workload:
    """A GPT-2 with tied embeddings."""
    torch.manual_seed(0)
    dropouts = {name: str(way.dropout) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    return resolve_target(
        "transformers:gpt2",
        device="cpu",
        batch=SHAPE[0],
        seq=SHAPE[1],
        overrides=SIZES | dropouts,
        optimizer="adamw",
    )


def batch_of(number: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(number)
    return {k: torch.randint(200, SHAPE, generator=random) for k in ("input_ids", "labels")}


def plan_of(way: Way, workload: Workload) -> Plan:
    """A plan with just this technique."""
    how: dict[str, Any] = {"executor": "module"}
    if way.setup:
        modules = [f"transformer.h.{n}" for n in range(2)]
        setup = Setup((way.name,), workload.model, workload.optimizer, modules, 2**12)
        profile = memfit.profile(workload, accumulate=ACCUMULATE, setup=setup, **how)
        return memfit.plan(profile, strategy="none")
    profile = memfit.profile(workload, accumulate=ACCUMULATE, **how)
    if way.name == "recompute":
        return memfit.plan(profile, strategy="all")
    if way.name == "offload":
        return memfit.plan(profile, strategy="swap", min_tensor_bytes=1)
    assert way.name == "microbatch"
    how |= {"steps": 1, "accumulate": ACCUMULATE, "allow": way.name}
    with memfit.fit_workload(workload, "75%", **how) as fitted:
        return fitted.plan


def scheduled(workload: Workload) -> Any:
    return torch.optim.lr_scheduler.StepLR(workload.optimizer, 5, gamma=0.5)


def everything(workload: Workload, scheduler: Any) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "model": dict(workload.model.state_dict()),
            "optimizer": workload.optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "random": torch.get_rng_state(),
        }
    )


def load(workload: Workload, scheduler: Any, saved: dict[str, Any]) -> None:
    workload.model.load_state_dict(saved["model"])
    # An optimizer goes on with the tensors that it is given.
    workload.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    scheduler.load_state_dict(saved["scheduler"])
    torch.set_rng_state(saved["random"])


def plainly(workload: Workload, scheduler: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        for part in range(ACCUMULATE):
            loss = workload.compute_loss(batch_of(step * ACCUMULATE + part))
            losses.append(loss.item())
            (loss / ACCUMULATE).backward()
        torch.nn.utils.clip_grad_norm_(workload.model.parameters(), CLIP)
        workload.optimizer.step()
        workload.optimizer.zero_grad()
        scheduler.step()
    return losses


def fitted_steps(fitted: Fitted, scheduler: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        for part in range(ACCUMULATE):
            batch = batch_of(step * ACCUMULATE + part)
            loss = fitted.step(batch, clip_norm=CLIP, scheduler=scheduler)
            losses.append(loss.item())
    return losses


def fit(way: Way, workload: Workload, plan: Plan) -> Fitted:
    fitted = memfit.fit_workload(workload, plan=plan, steps=1, accumulate=ACCUMULATE)
    assert way.name in fitted.plan.techniques
    return fitted


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_losses_and_checkpoints_are_those_of_the_plain_loop(way: Way) -> None:
    plain, first, second, third = (build(way) for _ in range(4))
    scheduler = scheduled(plain)
    torch.manual_seed(5)
    losses = plainly(plain, scheduler, range(STEPS))
    end = everything(plain, scheduler)

    plan, half = plan_of(way, first), range(STEPS // 2)
    scheduler = scheduled(first)
    with fit(way, first, plan) as fitted:
        torch.manual_seed(5)
        seen = fitted_steps(fitted, scheduler, half)
        middle = everything(first, scheduler)
    rest = range(STEPS // 2, STEPS)
    scheduler = scheduled(second)
    with fit(way, second, plan) as fitted:
        load(second, scheduler, middle)
        seen += fitted_steps(fitted, scheduler, rest)
        ended = everything(second, scheduler)
    tolerance = 0.0 if way.exact else TOLERANCE
    torch.testing.assert_close(seen, losses, rtol=tolerance, atol=0)
    for key in ("model", "optimizer") if way.exact else ("model",):
        torch.testing.assert_close(ended[key], end[key], rtol=tolerance, atol=tolerance)

    # A plain optimizer goes on from the technique's checkpoint as it does from its own.
    scheduler = scheduled(third)
    load(third, scheduler, middle)
    plain_rest = plainly(third, scheduler, rest)
    torch.testing.assert_close(plain_rest, losses[len(half) * 2 :], rtol=tolerance, atol=0)
