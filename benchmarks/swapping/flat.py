"""A thousand steps: what the device and the host hold must not grow.

Bytes in use are the same from the first look on. What the allocator holds is as well where a plan
sets the moments at which memory is freed. The valve also frees when it sees that a copy is over,
which is earlier in one step and later in the next: free memory is cut into other pieces then, and
the allocator goes on holding what the worst order needed so far. Such maxima become rare; a leak
goes on as it began, and shows in the bytes in use. So with the valve the last third counts.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import psutil
import torch
from common import say

import memfit
from memfit.measure.step import run_step, untouched
from memfit.runtime.apply import Applied
from memfit.runtime.pressure.valve import Valve
from swapping.session import Session

NAME = "encoder@32x256"
VALVE = "valve"
KINDS = ("swap module", "swap graph", VALVE)
LOOKS, TINY_LOOKS = (100, 300, 500, 700, 1000), (2, 6, 10, 14, 20)  # after so many steps
GROWTH = 16 * 2**20  # of the process: Python's own allocator comes and goes by some megabytes


def run(session: Session, kind: str) -> dict[str, Any]:
    """One way of swapping everything, for a thousand steps."""
    workload = session.workload(NAME)
    looks = TINY_LOOKS if session.tiny else LOOKS
    applied, valve = None, None
    if kind == VALVE:
        smallest = 1024 if session.tiny else 2**20
        valve = memfit.pressure(0, device=session.device, min_tensor_bytes=smallest)
        at_work: AbstractContextManager[Any] = valve
    else:
        profile = session.profile(NAME, kind.split()[1])
        plan = memfit.plan(profile, strategy="swap", allow="offload")
        at_work = applied = Applied(plan, workload.model)
    seen: dict[str, dict[str, int]] = {}
    if session.cuda:
        torch.cuda.reset_peak_memory_stats(session.device)
    with untouched(workload), at_work:
        for number in range(1, looks[-1] + 1):
            run_step(workload)
            if number in looks:
                say(f"  {kind}: step {number}")
                seen[str(number)] = _held(session, applied, valve)
        swaps = _moves(applied, valve)
    first, *_, last = seen.values()
    return {
        "seen": seen,
        "swaps": swaps,
        "growth_bytes": {name: last[name] - first[name] for name in first},
        "flat": swaps > 0 and is_flat(list(seen.values()), settles=kind == VALVE),
    }


def is_flat(seen: Sequence[Mapping[str, int]], *, settles: bool) -> bool:
    """Whether nothing grew from look to look; what `settles` may grow before the last third."""
    first, *_, before, last = seen
    return (
        last["allocated"] <= first["allocated"]
        and last["reserved"] <= (before if settles else first)["reserved"]
        and last["arena"] == first["arena"]
        and last["rss"] - first["rss"] <= GROWTH
    )


def _moves(applied: Applied | None, valve: Valve | None) -> int:
    if valve is not None:
        return valve.statistics.swaps
    return 0 if applied is None or applied.swap is None else applied.swap.statistics().moves


def _held(session: Session, applied: Applied | None, valve: Valve | None) -> dict[str, int]:
    gc.collect()
    held = {"allocated": 0, "peak": 0, "reserved": 0, "arena": 0}
    if session.cuda:
        torch.cuda.synchronize(session.device)
        held["allocated"] = torch.cuda.memory_allocated(session.device)
        held["peak"] = torch.cuda.max_memory_allocated(session.device)  # since the last look
        held["reserved"] = torch.cuda.memory_reserved(session.device)
        torch.cuda.reset_peak_memory_stats(session.device)
    if applied is not None and applied.swap is not None:
        held["arena"] = applied.swap.statistics().host_bytes
    if valve is not None:
        held["arena"] = valve.statistics.host_highest_bytes
    held["rss"] = psutil.Process().memory_info().rss
    return held
