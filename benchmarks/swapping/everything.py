"""All that can be moved is moved: how fast, how well hidden, beside torch's save_on_cpu."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

import memfit
from memfit.runtime.apply import Applied
from memfit.runtime.swap.host_memory import free_host_bytes
from memfit.verify.numerics import check_numerics
from swapping.session import Session, empty_host_cache
from swapping.systems import System, a_a_spread, measure_systems, traffic

PEER_NEEDS = 3.5  # times what is moved, with memfit's own: it rounds up to powers of two


def run(session: Session, name: str, executor: str) -> dict[str, Any]:
    """One workload by one executor."""
    workload, profile = session.workload(name), session.profile(name, executor)
    rates = session.rates()
    plan = memfit.plan(profile, strategy="swap", allow="offload")
    planned = Applied(plan, workload.model)
    eager = plan.executor == "module"
    unplanned = None if eager else Applied(plan.unplanned(), workload.model)
    systems = {
        "plain": System() if unplanned is None else System.of(unplanned),
        "swap": System.of(planned),
    }
    if eager and PEER_NEEDS * plan.host_bytes < free_host_bytes():
        systems["save_on_cpu"] = System(lambda: _save_on_cpu(session))
    rows = measure_systems(workload, systems, session.steps)
    moved = traffic(planned, rates)
    if session.cuda:
        empty_host_cache()
    numerics = check_numerics(workload, planned, unplanned)
    bound_s = max(moved.get("copy_bound_s", 0.0), rows["plain"]["step_s"])
    return {
        "systems": rows,
        "traffic": moved,
        "rates": vars(rates),
        "bound_s": bound_s,
        "bound_ratio": rows["swap"]["step_s"] / bound_s if "step_s" in rows["swap"] else None,
        "predicted": {
            "peak_bytes": plan.predicted.peak_bytes,
            "step_s": plan.predicted.step_s,
            "copy_s": plan.predicted.copy_s,
            "stall_s": plan.predicted.stall_s,
        },
        "static_bytes": plan.static_bytes,
        "host_bytes": plan.host_bytes,
        "plan_s": plan.plan_s,
        "drag": None if profile.copy is None else profile.copy.drag,
        "a_a": a_a_spread(rows, "plain"),
        "numerics": vars(numerics),
    }


def _save_on_cpu(session: Session) -> AbstractContextManager[Any]:
    return torch.autograd.graph.save_on_cpu(pin_memory=session.cuda)
