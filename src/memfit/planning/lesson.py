"""What a plan could do instead of recomputing segments whole, if that had ever run.

Peaks of variants that did not run are reckoned operator by operator, and fused code takes less. So
a lean variant may seem to need more memory than the plan has, which then recomputes the segment
whole, by its unplanned code. Running the variant once tells.
"""

from __future__ import annotations

from dataclasses import replace

from memfit.ir.plan import Plan
from memfit.ir.profile import Profile
from memfit.planning.acts import Act, Pick, calls_of
from memfit.planning.make_plan import Goal
from memfit.planning.simulate import Simulator, simulator_of
from memfit.planning.write_plan import read_acts, write_segments


def untried(profile: Profile, plan: Plan, goal: Goal) -> Plan | None:
    """The plan with the leanest variants in the place of segments that are recomputed whole.

    None when all of these ran already. It need not hold the budget: it is there to be run once.
    """
    if profile.executor != "inductor":  # by single operators a peak is what was reckoned
        return None
    simulator = simulator_of(profile, goal.min_tensor_bytes, goal.techniques)
    acts: list[Act] = []
    new = False
    for act in read_acts(simulator, plan):
        picks = _leanest(simulator, act) if isinstance(act, tuple) else None
        acts += [act] if picks is None else picks
        new |= picks is not None
    if not new:
        return None
    segments, variants = write_segments(simulator, acts)
    predicted = replace(plan.predicted, step_s=simulator.step_seconds(acts))
    return replace(plan, segments=segments, variants=variants, predicted=predicted, trim=False)


def _leanest(simulator: Simulator, run: tuple[int, int]) -> list[Act] | None:
    """The leanest variant of every call of a run; None where one has none, or all were measured."""
    picks: list[Act] = []
    new = False
    for index in calls_of(run):
        call = simulator.graph.calls[index]
        if call.graph < 0 or call.need < 0:
            return None
        menu = simulator.menus[call.graph]
        number = min(range(1, len(menu)), key=lambda n: menu[n][0].held_bytes, default=None)
        if number is None:
            return None
        picks.append(Pick(index, number))
        new |= not menu[number][0].measured
    return picks if new else None
