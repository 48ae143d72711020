"""A thousand steps: what the device and the host hold must not grow."""

from __future__ import annotations

import gc
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
KINDS = ("swap module", "swap graph", "valve")
STEPS, FIRST = 1000, 100
GROWTH = 16 * 2**20  # of the process: Python's own allocator comes and goes by some megabytes


def run(session: Session, kind: str) -> dict[str, Any]:
    """One way of swapping everything, for a thousand steps."""
    workload = session.workload(NAME)
    steps, first = (20, 5) if session.tiny else (STEPS, FIRST)
    applied, valve = None, None
    if kind == "valve":
        smallest = 1024 if session.tiny else 2**20
        valve = memfit.pressure(0, device=session.device, min_tensor_bytes=smallest)
        at_work: AbstractContextManager[Any] = valve
    else:
        profile = session.profile(NAME, kind.split()[1])
        plan = memfit.plan(profile, strategy="swap", allow="offload")
        at_work = applied = Applied(plan, workload.model)
    seen: dict[str, dict[str, int]] = {}
    with untouched(workload), at_work:
        for number in range(1, steps + 1):
            run_step(workload)
            if number in (first, steps):
                say(f"  {kind}: step {number}")
                seen[str(number)] = _held(session, applied, valve)
        swaps = _moves(applied, valve)
    early, late = seen.values()
    return {
        "seen": seen,
        "swaps": swaps,
        "growth_bytes": {name: late[name] - early[name] for name in early},
        "flat": swaps > 0
        and late["allocated"] <= early["allocated"]
        and late["reserved"] <= early["reserved"]
        and late["arena"] == early["arena"]
        and late["rss"] - early["rss"] <= GROWTH,
    }


def _moves(applied: Applied | None, valve: Valve | None) -> int:
    if valve is not None:
        return valve.statistics.swaps
    return 0 if applied is None or applied.swap is None else applied.swap.statistics().moves


def _held(session: Session, applied: Applied | None, valve: Valve | None) -> dict[str, int]:
    gc.collect()
    held = {"allocated": 0, "reserved": 0, "arena": 0}
    if session.cuda:
        torch.cuda.synchronize(session.device)
        held["allocated"] = torch.cuda.memory_allocated(session.device)
        held["reserved"] = torch.cuda.memory_reserved(session.device)
    if applied is not None and applied.swap is not None:
        held["arena"] = applied.swap.statistics().host_bytes
    if valve is not None:
        held["arena"] = valve.statistics.host_highest_bytes
    held["rss"] = psutil.Process().memory_info().rss
    return held
