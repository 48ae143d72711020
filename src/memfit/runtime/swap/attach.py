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

# More than the plan says, for storages that are a little larger than the tensors in them. It is
# taken when it turns out to be needed: what the plan says is within the host budget, this may not.
ROOM = 1.02
# The latest arena of each model. One plan at most is at work on a model, so its plans take turns;
# those of two models may be at work at once.
_arenas: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Arena]] = (
    weakref.WeakKeyDictionary()
)


def arena_for(plan: Plan, model: torch.nn.Module) -> Arena:
    """Host memory for what the plan moves; the plans of one model share it.

    HostMemoryError when it cannot be had.
    """
    module = unwrap(model)
    pinned = next(module.parameters()).is_cuda
    moves = sum(
        len(plan.variants[s.variant].offloaded) for s in plan.segments if s.variant is not None
    )
    spare = int((ROOM - 1) * plan.host_bytes) + GRAIN * (moves + len(plan.segments))
    known = _arenas.get(module)
    arena = None if known is None else known()
    if arena is None or arena.pinned != pinned or arena.capacity_bytes < plan.host_bytes:
        arena = Arena(plan.host_bytes, pinned)
        _arenas[module] = weakref.ref(arena)
    arena.grows_until = max(arena.grows_until, plan.host_bytes + spare)
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
