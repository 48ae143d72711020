"""Only what hides is moved: the lowest peak at which nothing waits for a copy."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from common import say
from systems import System, a_a_spread, again, compared, measure_systems, traffic

from memfit.errors import InfeasibleError
from memfit.ir.plan import Plan
from memfit.ir.profile import Profile
from memfit.measure.step import run_step, untouched
from memfit.measure.timing import Clock, host_and_step_seconds
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.simulate import Simulator
from memfit.runtime.apply import Applied
from memfit.runtime.swap.host_memory import default_host_budget
from memfit.verify.numerics import check_numerics
from memfit.workload import Workload
from swapping.session import Session

STALL_SHARE = 0.01  # of the step may be spent waiting,
MOST_SLOWDOWN = 1.03  # and so many times as long may it take, by the prediction
SURE = 0.8  # of the rate at which copies run
PROBES = 6
ROUNDS = 4  # for each step that is asked for: a few per cent are to be told from none


def run(session: Session, name: str, executor: str) -> dict[str, Any]:
    """One workload by one executor."""
    workload, profile = session.workload(name), session.profile(name, executor)
    plan = lowest_hidden(profile)
    if plan is None:
        return {"why": "no plan that moves anything hides its copies"}
    planned = Applied(plan, workload.model)
    eager = plan.executor == "module"
    unplanned = None if eager else Applied(plan.unplanned(), workload.model)
    plain = System() if unplanned is None else System.of(unplanned)
    rows = measure_systems(
        workload, {"plain": plain, "hides": System.of(planned)}, ROUNDS * session.steps
    )
    moved = traffic(planned, session.rates())
    return {
        "systems": rows,
        "traffic": moved,
        "predicted_peak_bytes": plan.predicted.peak_bytes,
        "predicted_ratio": plan.predicted.step_s / plan.baseline_step_s,
        "predicted_hidden_share": _hidden(plan),
        "ratio": rows["hides"]["step_s"] / rows["plain"]["step_s"],
        "a_a": a_a_spread(rows, "plain"),
        "by_rounds": compared(rows, "hides", "plain"),
        "a_a_by_rounds": compared(rows, again("plain"), "plain"),
        "predicted_forward_s": sum(Simulator(profile).copies.forward_s),
        "forward_s": _forward_seconds(workload),
        "host_s": _host_seconds(workload, planned),
        "numerics": vars(check_numerics(workload, planned, unplanned)),
    }


def _forward_seconds(workload: Workload) -> float:
    """Of the plain step's forward, behind another step: the time that copies out have."""
    clock, moments = Clock(workload.device), {}

    def phase(name: str) -> None:
        moments[name] = clock.now()

    with untouched(workload):
        for _ in range(3):
            run_step(workload, phase=phase)
        clock.settle()
    return clock.seconds(moments["forward"], moments["backward"])


def _host_seconds(workload: Workload, planned: Applied) -> dict[str, float]:
    """That launching a step takes: near the step itself, the host is what holds it up."""
    seconds = {}
    contexts: dict[str, AbstractContextManager[Any]] = {"plain": nullcontext(), "hides": planned}
    with untouched(workload):
        for name, around in contexts.items():
            with around:
                seconds[name], _ = host_and_step_seconds(
                    partial(run_step, workload), workload.device
                )
    return seconds


def lowest_hidden(profile: Profile) -> Plan | None:
    """The plan of the lowest budget, in live bytes, that hides its copies; None: there is none.

    Found by halving: plans of larger budgets are taken to hide theirs, too. At the lowest of all
    nothing is to spare, so it must hide them if they were slower, too.
    """
    assert profile.copy is not None
    out, back = (SURE * r for r in (profile.copy.out_bytes_per_s, profile.copy.in_bytes_per_s))
    slower = replace(profile.copy, out_bytes_per_s=out, in_bytes_per_s=back)
    live = replace(profile, allocator=None, copy=slower)
    goal = Goal(techniques=("offload",), host_bytes=default_host_budget(), time_limit_s=2.0)

    def probe(budget: int) -> Plan | None:
        try:
            return make_plan(live, replace(goal, budget_bytes=budget))
        except InfeasibleError:
            return None

    assert profile.baseline is not None
    high = profile.baseline.peak_bytes
    low = profile.graph.fixed_bytes
    best = None
    for _ in range(PROBES):
        budget = (low + high) // 2
        plan = probe(budget)
        if plan is not None and hides(plan):
            high = budget
            best = plan if plan.host_bytes else best
        else:
            low = budget
        say(f"  {budget / 2**20:.0f} MB: {_said(plan)}")
    return best


def hides(plan: Plan) -> bool:
    """Whether, by the prediction, next to nothing waits for the plan's copies."""
    waits = plan.predicted.stall_s / plan.baseline_step_s
    return waits <= STALL_SHARE and plan.predicted.step_s <= MOST_SLOWDOWN * plan.baseline_step_s


def _said(plan: Plan | None) -> str:
    if plan is None:
        return "no plan"
    ratio = plan.predicted.step_s / plan.baseline_step_s
    return f"{plan.host_bytes / 2**20:.0f} MB moved, {ratio:.3f}x predicted"


def _hidden(plan: Plan) -> float:
    copy_s = plan.predicted.copy_s
    return max(0.0, 1 - plan.predicted.stall_s / copy_s) if copy_s > 0 else 1.0
