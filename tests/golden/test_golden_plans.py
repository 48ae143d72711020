"""A recorded step must always get the same plans.

The profile of a tiny GPT-2 is kept in tiny_gpt2.profile.json, the plans it got in
tiny_gpt2.plans.json. Where a change of the planner or of the recorded step is meant, look at the
difference and write both anew:

    MEMFIT_REGENERATE_GOLDEN=1 python -m pytest tests/golden
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfit.ir.codec import from_data, to_data
from memfit.ir.plan import RECOMPUTE
from memfit.ir.profile import CallTime, Profile
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.simulate import Simulator

HERE = Path(__file__).parent
PROFILE, PLANS = HERE / "tiny_gpt2.profile.json", HERE / "tiny_gpt2.plans.json"
SHARES = ("0.75", "0.50", "0.35")
OVERRIDES = {"n_layer": "6", "n_embd": "32", "n_head": "2", "vocab_size": "100"}


def _regenerate() -> None:
    """Record the step and its plans anew, without what belongs to this machine.

    Times are rounded and then spread a little, so that no two plans cost the same.
    """
    from memfit.capture.profile import profile_workload
    from memfit.targets import resolve_target

    workload = resolve_target("transformers:gpt2", batch=4, seq=32, overrides=OVERRIDES)
    profile = profile_workload(workload)
    times = [
        CallTime(**{k: float(f"{v:.1g}") * (1 + number / 64) for k, v in vars(t).items()})
        for number, t in enumerate(profile.call_times)
    ]
    device = replace(profile.device, name="golden", capacity_bytes=10**9, free_bytes=10**9)
    step_s = float(f"{profile.step_s:.1g}")
    profile = replace(
        profile,
        call_times=tuple(times),
        step_s=step_s,
        host_slack_s=float(f"{profile.host_slack_s:.1g}"),
        baseline=None if profile.baseline is None else replace(profile.baseline, step_s=step_s),
        device=device,
    )
    PROFILE.write_text(json.dumps(to_data(profile), separators=(",", ":")) + "\n")
    plans = {share: _summary(profile, share) for share in SHARES}
    PLANS.write_text(json.dumps(plans, indent=1) + "\n")


@pytest.fixture(scope="module")
def profile() -> Profile:
    if os.environ.get("MEMFIT_REGENERATE_GOLDEN"):
        _regenerate()
    return from_data(Profile, json.loads(PROFILE.read_text()))


def _summary(profile: Profile, share: str) -> dict[str, Any]:
    """What a plan at this share of the activations decides and expects.

    Recomputed calls, not runs: the same calls grouped in two ways can have the same peak.
    """
    static = profile.graph.fixed_bytes
    budget = int(static + float(share) * (Simulator(profile).peak_bytes([]) - static))
    plan = make_plan(profile, Goal(budget_bytes=budget))
    return {
        "budget_bytes": budget,
        "recomputed": [s.name for s in plan.segments if s.decision == RECOMPUTE],
        "peak_bytes": plan.predicted.peak_bytes,
        "step_s": round(plan.predicted.step_s, 9),
        "where": plan.predicted.where,
        "categories": plan.predicted.categories,
        "minimum_feasible_bytes": plan.minimum_feasible_bytes,
    }


@pytest.mark.parametrize("share", SHARES)
def test_the_plan_is_the_stored_one(profile: Profile, share: str) -> None:
    stored = json.loads(PLANS.read_text())
    assert _summary(profile, share) == stored[share]


def test_the_stored_step_is_a_whole_one(profile: Profile) -> None:
    """The golden step still has what plans depend on: chains, saved blocks, gradients."""
    graph = profile.graph
    assert sum(not c.leaf for c in graph.calls) == 6
    assert sum(c.chained for c in graph.calls) >= 5
    assert graph.gradient_bytes == graph.static["parameters"]
    assert profile.baseline is not None
    predicted = Simulator(profile).peak_bytes([])
    assert predicted == pytest.approx(profile.baseline.peak_bytes, rel=0.001)
    assert from_data(Profile, json.loads(json.dumps(to_data(profile)))) == profile
