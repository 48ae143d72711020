"""How swapping goes on a device: its copies, and what the host has to do for each of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from memfit.ir.profile import CopyRates
from memfit.measure.bandwidth import copy_rates
from memfit.measure.turns import alone
from memfit.runtime.calls import Direct
from memfit.runtime.swap.arena import Arena
from memfit.runtime.swap.engine import CallMoves, Swap
from memfit.runtime.swap.lanes import lanes_for

TENSORS, BYTES, REPEATS = 32, 2**16, 9


@alone()
def swap_rates(device: torch.device) -> CopyRates | None:
    """How memory moves to the host and back; None when the device has no room to measure it."""
    rates = copy_rates(device)
    if rates is None or not rates.overlap:
        return rates
    return replace(rates, host_s=host_seconds(device))


@cache
def host_seconds(device: torch.device) -> float:
    """Seconds that the host spends on one tensor that is moved and brought back.

    The device is not waited for: its copies are short, and the host runs ahead of it.
    """
    lanes = lanes_for(device)
    arena = Arena(TENSORS * BYTES, lanes.pinned)
    plain = Direct()
    moving = Swap(plain, {0: CallMoves(None, 1, 1, 0)}, 1, arena, lanes)
    x = torch.ones(BYTES // 4, device=device, requires_grad=True)

    def step(engine: Callable[..., Any]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        engine(0, _sines, (x,), {}).sum().backward()
        return time.perf_counter() - start

    try:
        without, moved = ([step(e) for _ in range(REPEATS)] for e in (plain, moving))
    finally:
        moving.close()
        arena.close()
    return max(min(moved) - min(without), 0.0) / TENSORS


def _sines(x: torch.Tensor) -> torch.Tensor:
    for _ in range(TENSORS):  # each keeps what it is given
        x = x.sin()
    return x
