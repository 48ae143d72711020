"""Ways to run one step, measured side by side: peaks by themselves, seconds in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from common import say, tidy

from memfit.errors import MemfitError
from memfit.measure.cuda_allocator import settle_optimizer_state
from memfit.measure.memory import Peak, measure_peak, memory_cap
from memfit.measure.step import drop_gradients, is_out_of_memory, run_step, untouched
from memfit.measure.timing import Inside, ratio_by_rounds, time_interleaved
from memfit.runtime.apply import Applied
from memfit.workload import Workload

Rows = dict[str, dict[str, Any]]
WARMUP = 3
LIMIT_S = 4.0  # of timing, for each round asked for: then three rounds are enough
QUICK_LIMIT_S = 10.0


@dataclass(frozen=True)
class System:
    """One way to run a step: what stands around it, and the cap under which it must run."""

    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    cap_bytes: int | None = None
    apart: bool = False  # it gives pages back, which the step after it would miss
    applied: Applied | None = None
    step: Callable[[], Any] | None = None  # None: the workload's own, inside of what stands around
    seen: Callable[[Peak], Peak] = lambda peak: peak  # with what the allocator did not see

    @staticmethod
    def of(applied: Applied, cap_bytes: int | None = None) -> System:
        """A plan at work."""
        trims = applied.plan.trim
        return System(lambda: applied, cap_bytes, trims, applied, seen=applied.whole)


def measure_systems(workload: Workload, systems: Mapping[str, System], steps: int) -> Rows:
    """Peak and seconds of each system; the first one stands for A/A a second time.

    One that goes out of memory, under its cap or without, has a row that says so.
    """
    rows: Rows = {}
    with untouched(workload):
        for name, system in systems.items():
            say(f"  {name}")
            rows[name] = peak_of(workload, system, settle=not rows)
        time_systems(workload, systems, rows, steps)
    return rows


def time_systems(workload: Workload, systems: Mapping[str, System], rows: Rows, steps: int) -> None:
    """Add the seconds of all systems that have a peak to their rows, timed in turn."""
    works = {n: _step(workload, s) for n, s in systems.items() if "error" not in rows[n]}
    together = {n: work for n, work in works.items() if not systems[n].apart}
    first = next(iter(systems))
    assert first in together, f"{first} is what the others are compared with"
    together[again(first)] = together[first]
    turns = [together, *({n: works[n]} for n in works if n not in together)]
    for system in systems.values():
        if system.applied is not None and system.applied.swap is not None:
            system.applied.swap.reset_statistics()
    say("  timing")
    for turn in turns:
        timings = time_interleaved(
            turn, workload.device, rounds=steps, warmup=WARMUP, limit_s=LIMIT_S * steps
        )
        for name, timing in timings.items():
            rows.setdefault(name, {}).update(
                step_s=timing.median_s,
                spread_s=timing.spread_s,
                rounds=len(timing.samples),
                apart=turn is not together,
                samples_s=[round(sample, 7) for sample in timing.samples],
            )


def quick_seconds(
    workload: Workload, systems: Mapping[str, System], rows: Rows, names: Sequence[str]
) -> dict[str, float]:
    """Seconds of these systems that have a peak, by a few steps: to tell them apart, no result."""
    works = {n: _step(workload, systems[n]) for n in names if "peak_bytes" in rows[n]}
    timings = time_interleaved(works, workload.device, rounds=3, warmup=1, limit_s=QUICK_LIMIT_S)
    return {name: timing.median_s for name, timing in timings.items()}


def traffic(applied: Applied, rates: Any) -> dict[str, Any]:
    """What a plan's engine moved in an average step of the timed ones, and how well it hid."""
    if applied.swap is None:
        return {"moved_bytes": 0}
    done = applied.swap.statistics()
    out, back = done.per_step(done.out.bytes), done.per_step(done.back.bytes)
    return {
        "steps": done.steps,
        "moved_bytes": out,
        "restored_bytes": back,
        "moves": done.per_step(done.moves),
        "late": done.per_step(done.late),
        "stayed": done.per_step(done.stayed),
        "out_gb_per_s": done.out_gb_per_s,
        "in_gb_per_s": done.in_gb_per_s,
        "out_share": done.out_gb_per_s * 1e9 / rates.to_host,
        "in_share": done.in_gb_per_s * 1e9 / rates.to_device,
        "stalled_s": done.per_step(done.stalled_s),
        "out_stalled_s": done.per_step(done.out.stalled_s),
        "stalls": done.per_step(done.stalls),
        "hidden_share": done.hidden_share,
        "copy_bound_s": out / rates.to_host + back / rates.to_device,
        "host_bytes": done.host_bytes,
        "host_highest_bytes": done.host_highest_bytes,
    }


def a_a_spread(rows: Mapping[str, Mapping[str, Any]], first: str) -> float:
    """What the clock makes of no difference, as a share of the step."""
    one, other = rows[first], rows[again(first)]
    apart = abs(other["step_s"] - one["step_s"])
    return max(apart, one["spread_s"], other["spread_s"]) / float(one["step_s"])


def compared(
    rows: Mapping[str, Mapping[str, Any]], name: str, first: str
) -> dict[str, float] | None:
    """How many times as long as the first a system took, by rounds; None if timed by itself."""
    if rows[name]["apart"]:
        return None
    ratio, low, high = ratio_by_rounds(rows[name]["samples_s"], rows[first]["samples_s"])
    return {"ratio": ratio, "low": low, "high": high}


def again(first: str) -> str:
    """The name under which the first system ran a second time in each round."""
    return f"{first} again"


def compared_text(found: Mapping[str, float]) -> str:
    """As a cell of a table."""
    return f"{found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def _step(workload: Workload, system: System) -> Callable[[], Any]:
    return system.step or Inside(system.around, lambda: run_step(workload))


def peak_of(
    workload: Workload, system: System, *, settle: bool, any_failure: bool = False
) -> dict[str, Any]:
    """Peak of two steps after some to warm up; `settle` the optimizer's state after the first.

    A failure is a row as well: out of memory, a refusal of memfit's, or any at all.
    """
    step = _step(workload, system)
    begun = time.perf_counter()
    try:
        with memory_cap(workload.device, system.cap_bytes):
            for number in range(WARMUP):  # compiles, pins host memory
                step()
                if settle and number == 0:
                    settle_optimizer_state(workload.optimizer, workload.device)
            if workload.device.type == "cuda":
                torch.cuda.synchronize(workload.device)
                torch.cuda.empty_cache()
            first_s = time.perf_counter() - begun
            peak = measure_peak(workload, lambda: (step(), step()))
            peak = system.seen(peak)
            if system.applied is not None:
                system.applied.release()  # the next one is measured by itself
    except Exception as error:
        drop_gradients(workload)
        expected = isinstance(error, MemfitError) or is_out_of_memory(error)
        if not (expected or any_failure):
            raise
        row = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    else:
        return {
            "peak_bytes": peak.bytes,
            "reserved_bytes": peak.reserved_bytes,
            "retries": peak.retries,
            "first_steps_s": first_s,
        }
    tidy()  # outside of the except block what the failed step held is free
    return row
