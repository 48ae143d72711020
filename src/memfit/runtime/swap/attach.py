"""A swap engine for a plan, and the host memory it needs."""

from __future__ import annotations

import weakref

import torch

from memfit.ir.plan import Plan
from memfit.runtime.calls import Engine
from memfit.runtime.compile.compiled import compiled_segments
from memfit.runtime.swap.arena import GRAIN, Arena
from memfit.runtime.swap.engine import CallMoves, Swap
from memfit.runtime.swap.lanes import lanes_for
from memfit.workload import unwrap

# More than the plan says, for storages that are a little larger than the tensors in them.
ROOM = 1.02
_arenas: weakref.WeakValueDictionary[bool, Arena] = weakref.WeakValueDictionary()


def arena_for(plan: Plan, model: torch.nn.Module) -> Arena:
    """Host memory for what the plan moves; plans that take turns share it.

    HostMemoryError when it cannot be had.
    """
    pinned = next(unwrap(model).parameters()).is_cuda
    moves = sum(
        len(plan.variants[s.variant].offloaded) for s in plan.segments if s.variant is not None
    )
    wanted = int(ROOM * plan.host_bytes) + GRAIN * (moves + len(plan.segments))
    arena = _arenas.get(pinned)
    if arena is None or arena.capacity_bytes < wanted or arena.used_bytes:
        arena = Arena(wanted, pinned)
        _arenas[pinned] = arena
    return arena


def swap_around(engine: Engine, plan: Plan, model: torch.nn.Module, arena: Arena) -> Swap:
    """The engine that moves what the plan says, around the one that runs its segments."""
    module = unwrap(model)
    moves: dict[int, CallMoves] = {}
    for index, segment in enumerate(plan.segments):
        if segment.release is None or segment.prefetch is None:
            continue
        names = None
        if segment.variant is not None:
            names = frozenset(plan.variants[segment.variant].offloaded)
        smallest = plan.smallest_move_bytes if names is None else 1
        moves[index] = CallMoves(names, smallest, segment.release, segment.prefetch)
    return Swap(
        engine,
        moves,
        len(plan.segments),
        arena,
        lanes_for(next(module.parameters()).device),
        static=[*module.parameters(), *module.buffers()],
        compiled=None if plan.executor == "module" else compiled_segments(plan.executor),
    )
