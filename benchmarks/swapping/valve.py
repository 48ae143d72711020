"""The safety valve: with a plan, with memory to spare, under a cap, and after the pressure."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from common import say
from systems import System, a_a_spread, compared, measure_systems
from torch.utils._pytree import tree_map_only

import memfit
from memfit.ir.pressure import PressureStatistics
from memfit.measure.memory import measure_peak, memory_cap
from memfit.measure.step import (
    drop_gradients,
    is_out_of_memory,
    run_backward,
    run_step,
    untouched,
)
from memfit.measure.timing import time_interleaved
from memfit.runtime.apply import Applied
from memfit.runtime.pressure import module_calls
from memfit.runtime.pressure.attention import Attention
from memfit.runtime.pressure.valve import Valve
from memfit.verify.numerics import Numbers, compare, deterministic
from memfit.workload import Workload
from swapping.session import Session

NAME = "resnet50@32"
REDUCTION = 0.3
THRESHOLDS = (0.5, 0.3, 0.1, 0.0)  # of the plain step's peak
CAPS = (0.8, 0.6, 0.4)  # of (peak - static), above static
STEPS = 5
LOOPS = {"resnet50@32": 28, "resnet50@64": 16}  # steps that are timed as one, half a second
ROUNDS = 4  # for each step that is asked for: what costs nothing is to be told from what does
Patch = Callable[[], AbstractContextManager[Any]]
IDLE: dict[str, Patch] = {
    "valve 0.99": nullcontext,
    "as in Python 3.11": partial(patch.object, module_calls, "_MONITORING", None),
    "with its hooks all along": partial(patch.object, Attention, "_watch", lambda self: False),
}
BOUND = {"idle": "resnet50@32", "idle, bound by the device": "resnet50@64"}


def run_with_plan(session: Session) -> dict[str, Any]:
    """A recompute plan and the valve on top: counters, numbers, peaks beside each alone.

    Each is timed by itself, in a loop inside its valve: a valve that is left gives its host memory
    back, and to pin it again takes longer than the step.
    """
    workload, profile = session.workload(NAME), session.profile(NAME, "module")
    plan = memfit.plan(profile, activation_reduction=REDUCTION, allow="recompute")
    applied = Applied(plan, workload.model)
    capacity = _capacity(session)
    with deterministic():
        expected = _numbers(workload)
        again = compare(expected, _numbers(workload))
    rows: dict[str, dict[str, Any]] = {"plain": _loop(session, None, None, expected)}
    rows["plan"] = _loop(session, applied, None, expected)
    for threshold in THRESHOLDS:
        alone, both = f"valve {threshold:g}", f"plan and valve {threshold:g}"
        rows[alone] = _loop(session, None, _valve(session, threshold, capacity), expected)
        rows[both] = _loop(session, applied, _valve(session, threshold, capacity), expected)
        lowest = min(rows["plan"]["peak_bytes"], rows[alone]["peak_bytes"])
        rows[both]["below_each"] = rows[both]["peak_bytes"] < lowest
    rows["plain again"] = _loop(session, None, None, expected)
    return {
        "capacity_bytes": capacity,
        "plan_recomputes": sum(s.decision == "recompute" for s in plan.segments),
        "plain_repeats_itself": again.bitwise_vs_unplanned,
        "a_a": a_a_spread(rows, "plain"),
        "systems": rows,
    }


def run_idle(session: Session, name: str) -> dict[str, Any]:
    """With memory to spare: no swaps, and what being there costs.

    As it is, as it is in Python 3.11, and with its hooks all along. Loops are timed in turn, each
    inside its valve as a training loop is: how a valve watches calls makes Python run the first
    ones slowly whenever it is entered.
    """
    workload, steps = session.workload(name), LOOPS[name]
    capacity = None if session.cuda else 2**40
    valves = {key: memfit.pressure(0.99, capacity=capacity, device=session.device) for key in IDLE}

    def loop(around: AbstractContextManager[Any], as_it_would_be: Patch) -> None:
        with as_it_would_be(), around:
            for _ in range(steps):
                run_step(workload)

    loops = {"plain": partial(loop, nullcontext(), nullcontext)}
    loops |= {key: partial(loop, valve, IDLE[key]) for key, valve in valves.items()}
    systems = {key: System(step=step) for key, step in loops.items()}
    rows = measure_systems(workload, systems, ROUNDS * session.steps)
    for key, row in rows.items():
        row["step_s"], row["spread_s"] = row["step_s"] / steps, row["spread_s"] / steps
        row["fastest_s"] = min(row["samples_s"]) / steps
        row["by_rounds"] = compared(rows, key, "plain")
        if key in valves:  # without hooks on a GPU alone
            row |= {"swaps": valves[key].statistics.swaps, "dozes": valves[key].dozes}
    return {"systems": rows, "a_a": a_a_spread(rows, "plain"), "loop": steps}


def run_capped(session: Session, share: float) -> dict[str, Any]:
    """Under a cap of the allocator: does the plain step finish, does it with the valve?"""
    workload, profile = session.workload(NAME), session.profile(NAME, "module")
    assert profile.baseline is not None
    static, peak = profile.graph.fixed_bytes, profile.baseline.peak_bytes
    cap = int(static + share * (peak - static))
    with untouched(workload), memory_cap(workload.device, cap):
        row: dict[str, Any] = {"cap_bytes": cap, "plain": _finishes(workload, nullcontext())}
        capacity = None if session.cuda else cap - static
        for threshold in (0.8, 0.5):
            valve = _valve(session, threshold, capacity)
            say(f"  cap {share:.0%}, valve {threshold:g}")
            row[f"valve {threshold:g}"] = {
                **_finishes(workload, valve),
                **_did(valve.statistics),
            }
    return row


def run_after(session: Session) -> dict[str, Any]:
    """Pressure by a large batch, then a small one inside the same valve: swaps stop."""
    workload = session.workload(NAME)
    small = replace(
        workload, batch=tree_map_only(torch.Tensor, lambda t: t[: len(t) // 4], workload.batch)
    )
    valve = _valve(session, 0.7, _capacity(session))
    with untouched(workload), valve:
        for _ in range(STEPS):
            run_step(workload)
        under = valve.statistics
        for _ in range(STEPS):
            run_step(small)
        after = valve.statistics
    return {
        "swaps_under_pressure": under.swaps,
        "swaps_after": after.swaps - under.swaps,
        "stopped": after.swaps == under.swaps > 0,
    }


def _capacity(session: Session) -> int:
    """What the plain step needs; on the CPU saved tensors are all that is counted."""
    profile = session.profile(NAME, "module")
    assert profile.baseline is not None
    needed = profile.baseline.peak_bytes
    return needed if session.cuda else needed - profile.graph.fixed_bytes


def _valve(session: Session, threshold: float, capacity: int | None) -> Valve:
    smallest = 1024 if session.tiny else 2**20
    return memfit.pressure(
        threshold, capacity=capacity, device=session.device, min_tensor_bytes=smallest
    )


def _loop(
    session: Session, applied: Applied | None, valve: Valve | None, expected: Numbers
) -> dict[str, Any]:
    """Peak, seconds, counters and numbers of steps inside a valve, by a plan, or both."""
    workload = session.workload(NAME)
    with untouched(workload), ExitStack() as stack:
        if valve is not None:
            stack.enter_context(valve)
        if applied is not None:
            stack.enter_context(applied)
        repeats = None if applied is None else applied.recompute
        before = 0 if repeats is None else repeats.replays  # of other loops by the same plan
        for _ in range(3):
            run_step(workload)
        if session.cuda:
            torch.cuda.empty_cache()
        peak = measure_peak(workload, lambda: (run_step(workload), run_step(workload)))
        works = {"step": lambda: run_step(workload)}
        timing = time_interleaved(works, workload.device, rounds=session.steps)["step"]
        replays = 0 if repeats is None else repeats.replays - before
        did = {} if valve is None else _did(valve.statistics)
    with deterministic(), ExitStack() as stack:
        if valve is not None:
            stack.enter_context(valve)
        if applied is not None:
            stack.enter_context(applied)
        actual = _numbers(workload)
    told = compare(expected, actual)
    return {
        "peak_bytes": peak.bytes,
        "reserved_bytes": peak.reserved_bytes,
        "step_s": timing.median_s,
        "spread_s": timing.spread_s,
        "replays": replays,
        **did,
        "finite": bool(actual.loss.isfinite().all()),
        "bitwise": told.bitwise_vs_unplanned,
        "grad_max_rel_diff": told.grad_max_rel_diff,
    }


def _numbers(workload: Workload) -> Numbers:
    with untouched(workload):
        loss = workload.compute_loss()
        run_backward(workload, loss)
        model = workload.model
        return Numbers(
            loss.detach().cpu(),
            {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None},
            {n: b.detach().to("cpu", copy=True) for n, b in model.named_buffers()},
        )


def _finishes(workload: Workload, around: AbstractContextManager[Any]) -> dict[str, Any]:
    """Whether some steps run to their end; what they held is free afterwards."""
    loss = math.nan
    done = 0
    try:
        with ExitStack() as stack:
            stack.enter_context(around)
            for _ in range(STEPS):
                loss = run_step(workload).item()
                done += 1
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    drop_gradients(workload)
    gc.collect()
    if workload.device.type == "cuda":
        torch.cuda.empty_cache()
    return {"steps": done, "finished": done == STEPS, "finite": math.isfinite(loss)}


def _did(done: PressureStatistics) -> dict[str, Any]:
    return {
        "swaps": done.swaps,
        "retrievals": done.retrievals,
        "moved_bytes": done.moved_bytes,
        "waited_s": done.waited_s,
        "out_gb_per_s": done.out.gb_per_s,
        "in_gb_per_s": done.back.gb_per_s,
        "host_highest_bytes": done.host_highest_bytes,
    }
