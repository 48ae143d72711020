"""All that can be moved is moved: how fast, how well hidden, beside torch's save_on_cpu.

And what memfit makes of save_on_cpu's peak as a budget, by moving alone and with recompute.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from common import empty_host_cache, say
from systems import System, a_a_spread, measure_systems, peak_of, traffic

import memfit
from memfit.errors import InfeasibleError
from memfit.ir.profile import Profile
from memfit.measure.step import untouched
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime.apply import Applied
from memfit.runtime.swap.host_memory import default_host_budget, free_host_bytes
from memfit.verify.numerics import check_numerics
from memfit.workload import Workload
from swapping.session import Session

# What may be done to hold the peer's peak.
AT_ITS_PEAK = {"moved, at its peak": ("offload",), "both, at its peak": ("recompute", "offload")}
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
        systems |= _at_its_peak(workload, profile, systems["save_on_cpu"])
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


def _at_its_peak(workload: Workload, profile: Profile, peer: System) -> dict[str, System]:
    """Plans that hold the peer's peak, in live bytes as it is counted."""
    with untouched(workload):
        peak = peak_of(workload, peer, settle=True)
    live = replace(profile, allocator=None)
    found = {}
    for name, techniques in AT_ITS_PEAK.items():
        goal = Goal(
            budget_bytes=peak["peak_bytes"],
            techniques=techniques,
            host_bytes=default_host_budget(),
        )
        try:
            found[name] = System.of(Applied(make_plan(live, goal), workload.model))
        except InfeasibleError as refusal:
            say(f"  {name}: {refusal.message}")
    return found


def _save_on_cpu(session: Session) -> AbstractContextManager[Any]:
    return torch.autograd.graph.save_on_cpu(pin_memory=session.cuda)
