"""The proof of a fit: numbers, seconds and bytes of a plan that held its budget, as a Result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from memfit.holding import Held
from memfit.ir.profile import Profile
from memfit.ir.result import BaselineResult, Decisions, Measured, Numerics, Predicted, Result
from memfit.planning.budget import baseline_peak_bytes
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.techniques import MICROBATCH, OPTIMIZER, ROUNDED_STATE
from memfit.runtime.apply import Applied
from memfit.runtime.setup import Setup
from memfit.runtime.split import part_of
from memfit.verify.numerics import check_numerics
from memfit.verify.parameters import (
    APPROXIMATE_TOLERANCE,
    ELSEWHERE_TOLERANCE,
    STEPS,
    check_parameters,
)
from memfit.verify.parts import check_split
from memfit.verify.speed import Speed, compare_speed
from memfit.workload import Workload


def prove(
    workload: Workload,
    planned: Applied,
    base: Profile,
    held: Held,
    *,
    steps: int,
    force: Sequence[str] = (),
    say: Callable[[str], None],
) -> Result:
    """Compare the planned step with the unplanned one; `steps` of each are timed.

    `base` is the profile of the step before anything was done to it; what techniques that are
    forced change is only said.
    """
    plan, part = planned.plan, part_of(workload, planned.plan.split)
    begun = time.perf_counter()
    say("comparing numbers")
    numerics = _numbers(workload, part, planned, base.accumulate * plan.split)
    if plan.split > 1:
        numerics = check_split(workload, planned, numerics, forced=MICROBATCH in force)
    say("timing steps")
    if planned.swap is not None:
        planned.swap.reset_statistics()
    speed = compare_speed(
        part,
        planned,
        steps=steps,
        whole=workload,
        unplanned=_timed_beside(workload, planned, base),
        accumulate=base.accumulate,
        baseline=base.baseline is not None,
    )
    notes = [*plan.notes, *held.notes]
    if planned.graphs is not None and planned.graphs.refused is not None:
        notes.append(f"not launched as CUDA graphs after all: {planned.graphs.refused}")
    result = _result(base, planned, held, numerics, speed)
    if (slower := slower_than_allowed(result, speed, held.max_slowdown)) is not None:
        notes.append(slower)
    return replace(result, notes=tuple(notes), proof_s=time.perf_counter() - begun)


def slower_than_allowed(result: Result, speed: Speed, allowed: float | None) -> str | None:
    """That the step took longer than allowed, where the spreads of the timings cannot explain it.

    A plan is held to the limit by what is predicted.
    """
    planned, plain = speed.planned, speed.plain
    plain_s, spread_s = result.baseline.step_s, 0.0 if plain is None else plain.spread_s
    least = (planned.median_s - planned.spread_s) / (plain_s + spread_s)
    if allowed is None or least <= allowed:
        return None
    return (
        f"slower than allowed: the step takes {planned.median_s / plain_s:.3f}x the plain step's "
        f"time ({least:.3f}x or more, by the spread of both), and {allowed:g}x was the limit; "
        f"{result.predicted.time_ratio:.3f}x was predicted; a larger budget may take less"
    )


def _numbers(workload: Workload, part: Workload, planned: Applied, accumulate: int) -> Numerics:
    """How far the plan's numbers are from those of the same code with everything kept."""
    plan, unplanned = planned.plan, None
    if not plan.unplanned_is_plain:  # as CUDA graphs, its kernels are launched by the host
        unplanned = Applied(replace(plan.unplanned(), cuda_graphs=False), workload.model)
    numerics = check_numerics(part, planned, unplanned)
    if set(OPTIMIZER) & set(plan.setup):
        numerics = _with_parameters(part, planned, numerics, min(accumulate, 2))
    return numerics


def _timed_beside(workload: Workload, planned: Applied, base: Profile) -> Applied | None:
    """What the plan's seconds are compared with; None: the workload as it is."""
    plan = planned.plan
    if base.setup:  # the plan is one for a step that has it
        return Applied(plan.unplanned(), workload.model, planned.setup)
    if plan.unplanned_is_plain:
        return None
    if plan.setup or plan.split > 1:
        # By the code of the plain step: of whole batches, and with the head that tiles replace.
        plan = make_plan(base, Goal(strategy="none"))
    return Applied(plan.unplanned(), workload.model)


def _with_parameters(
    workload: Workload, planned: Applied, numerics: Numerics, accumulate: int
) -> Numerics:
    """The comparison with what the optimizer makes of it, without its techniques and with them."""
    others = [t for t in planned.plan.setup if t not in OPTIMIZER]
    tile_bytes = planned.plan.tile_bytes
    setup = Setup(others, workload.model, tile_bytes=tile_bytes) if others else None
    elsewhere = "step_on_host" in planned.plan.setup
    plain = Applied(planned.plan, workload.model, setup)
    stepped = check_parameters(workload, planned, plain, 1 if elsewhere else STEPS, accumulate)
    equal, apart, agree = stepped.bitwise_vs_unplanned, stepped.grad_max_rel_diff, stepped.agree
    note = stepped.note
    if stepped.repeatable:
        tolerance = ELSEWHERE_TOLERANCE if elsewhere else 0.0
        if {*ROUNDED_STATE} & {*planned.plan.setup}:
            tolerance = APPROXIMATE_TOLERANCE
        agree = agree or apart <= tolerance
        said = "the same as" if equal else f"{apart:.2g} of their largest from those"
        note = f"parameters are {said} after plain optimizer steps"
        numerics = replace(numerics, grad_max_rel_diff=max(numerics.grad_max_rel_diff, apart))
    return replace(
        numerics,
        bitwise_vs_unplanned=numerics.bitwise_vs_unplanned and equal,
        agree=numerics.agree and agree,
        repeatable=numerics.repeatable or not agree,  # these could be compared, and are others
        note=f"{numerics.note}; {note}" if numerics.note else note,
    )


def _result(
    measured: Profile, planned: Applied, held: Held, numerics: Numerics, speed: Speed
) -> Result:
    made, peak = planned.plan, held.check.peak
    assert peak is not None
    baseline = measured.baseline
    peak_bytes = baseline_peak_bytes(measured)
    return Result(
        workload=measured.workload,
        device=vars(measured.device),
        budget_bytes=made.budget_bytes or measured.device.capacity_bytes,
        baseline=BaselineResult(
            peak_bytes=peak_bytes,
            peak_reserved_bytes=peak_bytes if baseline is None else baseline.peak_reserved_bytes,
            static_bytes=measured.graph.fixed_bytes,
            step_s=measured.step_s if speed.plain is None else speed.plain.median_s,
            measured=baseline is not None,
        ),
        predicted=Predicted(
            made.predicted.peak_bytes,
            made.predicted.reserved_bytes,
            made.predicted.step_s,
            made.predicted.lower_bound_s,
            made.predicted.gap,
            made.predicted.step_s / made.baseline_step_s,
        ),
        measured=Measured(
            peak_bytes=peak.bytes,
            peak_reserved_bytes=peak.reserved_bytes,
            step_s=speed.planned.median_s,
            step_s_spread=speed.planned.spread_s,
            time_ratio=speed.ratio,
            same_code_ratio=speed.same_code_ratio,
            retries=peak.retries,
        ),
        decisions=Decisions(
            kept_bytes=made.kept_bytes,
            recomputed_bytes=made.recomputed_bytes,
            offloaded_bytes=made.offloaded_bytes,
            num_segments=len(made.segments),
            techniques=made.techniques,
            choices=made.choices,
        ),
        numerics=numerics,
        plan_s=made.plan_s,
        verdict="fits" if numerics.kept else "fits, and its numbers differ",
        minimum_feasible_bytes=made.minimum_feasible_bytes,
        rounds=held.rounds,
        swap=None if planned.swap is None else planned.swap.statistics(),
    )
