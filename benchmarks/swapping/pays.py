"""Strategies at the same budget on steps of long sequences: does moving pay beside recomputing?"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import say
from systems import System, a_a_spread, measure_systems, traffic

from memfit.capture.learn import learn_variants
from memfit.errors import InfeasibleError
from memfit.ir.codec import from_data, to_data
from memfit.ir.plan import Plan
from memfit.ir.profile import Profile
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime.apply import Applied
from memfit.runtime.swap.host_memory import default_host_budget
from memfit.workload import Workload
from swapping.session import Session

BOTH = ("recompute", "offload")
FIRST, OFFLOAD, RECOMPUTE = "unplanned", "optimal, offload too", "optimal, recompute only"
# Name -> strategy and what it may do.
STRATEGIES: dict[str, tuple[str, tuple[str, ...]]] = {
    RECOMPUTE: ("optimal", ("recompute",)),
    OFFLOAD: ("optimal", BOTH),
    "mutwo": ("mutwo", BOTH),
    "ratio": ("ratio", ("recompute",)),
    "interval": ("interval", ("recompute",)),
    "all": ("all", ("recompute",)),
    "swap": ("swap", ("offload",)),
}
ABOVE_LEAN = 1.05  # what the allocator may need beside the live bytes of the leanest peer


@dataclass(frozen=True)
class Planned:
    """What each strategy found for a budget, or why it found nothing."""

    plans: dict[str, Plan]
    refused: dict[str, str]


def run(
    session: Session, name: str, executor: str, share: float, lessons: int, keep: Path
) -> dict[str, Any]:
    """One workload at the budget that leaves `share` of the way from `all` to unplanned.

    The profile is kept in a file, for what other devices would make of it.
    """
    workload, profile = session.workload(name), session.profile(name, executor)
    rates = session.rates()
    budget = budget_at(profile, share)
    host = default_host_budget()
    profile = learn(workload, profile, budget, host, lessons)
    session.learned(name, executor, profile)
    write_profile(profile, keep)
    say(f"  planning for {budget / 2**20:.0f} MB")
    found = plan_all(profile, budget, host)
    some = next(iter(found.plans.values()))
    same = twins(found.plans)
    systems = {FIRST: System.of(Applied(some.unplanned(), workload.model))}
    # The one that needs most host memory first: the others use the same.
    for key, plan in sorted(found.plans.items(), key=lambda item: -item[1].host_bytes):
        if key not in same:
            systems[key] = System.of(Applied(plan, workload.model), budget)
    rows = measure_systems(workload, systems, session.steps)
    for key, plan in found.plans.items():
        twin = same.get(key, key)
        applied = systems[twin].applied
        assert applied is not None
        rows[key] = rows[twin] | predicted(plan) | {"traffic": traffic(applied, rates)}
        if key != twin:
            rows[key]["same_as"] = twin
    for key, why in found.refused.items():
        rows[key] = {"error": why}
    return {
        "budget_bytes": budget,
        "host_budget_bytes": host,
        "plain_peak_bytes": some.baseline_peak_bytes,
        "static_bytes": some.static_bytes,
        "rates": vars(rates),
        "copy": None if profile.copy is None else vars(profile.copy),
        "systems": rows,
        "a_a": a_a_spread(rows, FIRST),
        "verdict": verdict(rows, a_a_spread(rows, FIRST)),
    }


def budget_at(profile: Profile, share: float) -> int:
    """A budget that recomputing every segment holds, or `share` of the way from it to the peak."""
    assert profile.baseline is not None
    everything = make_plan(profile, Goal(strategy="all"))
    lean = int(ABOVE_LEAN * everything.predicted.peak_bytes)
    return int(lean + share * max(profile.baseline.peak_bytes - lean, 0))


def learn(workload: Workload, profile: Profile, budget: int, host: int, lessons: int) -> Profile:
    """The profile with what the optimal plans' variants show when they run, as a fit learns it."""
    for key in (RECOMPUTE, OFFLOAD):
        goal = _goal(key, budget, host)
        made = None
        for _ in range(lessons):
            say(f"  learning: {key}")
            try:
                made = make_plan(profile, goal, known=made)
            except InfeasibleError:
                break
            learned = learn_variants(workload, profile, made)
            if learned is None:
                break
            profile = learned
    return profile


def plan_all(profile: Profile, budget: int, host: int) -> Planned:
    """The plan of every strategy that holds the budget."""
    plans: dict[str, Plan] = {}
    refused: dict[str, str] = {}
    for key in STRATEGIES:
        try:
            plans[key] = make_plan(profile, _goal(key, budget, host))
        except InfeasibleError as refusal:
            refused[key] = f"refused: {refusal.message}"[:200]
    return Planned(plans, refused)


def twins(plans: Mapping[str, Plan]) -> dict[str, str]:
    """Strategies that found the very plan of an earlier one, which is run once, with that one."""
    found: dict[str, str] = {}
    first: dict[Any, str] = {}
    for key, plan in plans.items():
        does = (plan.segments, plan.variants, plan.runs, plan.trim)
        twin = first.setdefault(repr(does), key)
        if twin != key:
            found[key] = twin
    return found


def predicted(plan: Plan) -> dict[str, Any]:
    """What the simulator says of a plan."""
    return {
        "predicted_peak_bytes": plan.predicted.peak_bytes,
        "predicted_reserved_bytes": plan.predicted.reserved_bytes,
        "predicted_step_s": plan.predicted.step_s,
        "predicted_ratio": plan.predicted.step_s / plan.baseline_step_s,
        "predicted_stall_s": plan.predicted.stall_s,
        "predicted_copy_s": plan.predicted.copy_s,
        "gap": plan.predicted.gap,
        "recomputed_bytes": plan.recomputed_bytes,
        "offloaded_bytes": plan.offloaded_bytes,
        "host_bytes": plan.host_bytes,
        "plan_s": plan.plan_s,
        "trim": plan.trim,
    }


def verdict(rows: Mapping[str, Mapping[str, Any]], a_a: float) -> str:
    """Whether moving pays, and whether any other strategy is faster than `optimal`."""
    seconds = {key: row["step_s"] for key, row in rows.items() if "step_s" in row}
    ours, alone = seconds.get(OFFLOAD), seconds.get(RECOMPUTE)
    if ours is None:
        return "optimal with offload did not run"
    parts = []
    if alone is None:
        parts.append("recompute alone does not hold the budget")
    else:
        gain = 1 - ours / alone
        word = "beats" if gain > a_a else "equals" if gain >= -a_a else "loses to"
        parts.append(f"offload {word} recompute alone by {gain:+.1%} (A/A {a_a:.1%})")
    others = {k: s for k, s in seconds.items() if k in STRATEGIES and k != OFFLOAD}
    faster = [f"{k} ({s / ours:.3f})" for k, s in others.items() if s < ours * (1 - a_a)]
    parts.append(f"faster than optimal: {', '.join(faster) or 'none'}")
    return "; ".join(parts)


def write_profile(profile: Profile, path: Path) -> None:
    """Keep a profile for the part that simulates other devices."""
    path.write_bytes(gzip.compress(json.dumps(to_data(profile)).encode()))


def read_profile(path: Path) -> Profile:
    """The profile in a file."""
    return from_data(Profile, json.loads(gzip.decompress(path.read_bytes())))


def _goal(key: str, budget: int, host: int) -> Goal:
    strategy, techniques = STRATEGIES[key]
    host_bytes = host if "offload" in techniques else None
    return Goal(
        strategy=strategy, budget_bytes=budget, techniques=techniques, host_bytes=host_bytes
    )
