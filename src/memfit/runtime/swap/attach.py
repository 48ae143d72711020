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
# The latest arena of each model. One plan at most is at work on a model, so its plans take turns;
# those of two models may be at work at once.
_arenas: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Arena]] = (
    weakref.WeakKeyDictionary()
)


def arena_for(plan: Plan, model: torch.nn.Module) -> Arena:
    """Host memory for what the plan moves, within its host budget; the plans of a model share it.

    All of it is taken now: pinning would stop a step. HostMemoryError when it cannot be had.
    """
    module = unwrap(model)
    pinned = next(module.parameters()).is_cuda
    known = _arenas.get(module)
    arena = None if known is None else known()
    if arena is None or arena.pinned != pinned:
        arena = Arena(0, pinned)
        _arenas[module] = weakref.ref(arena)
    # What another plan of the model needs is there already, and there is no more of it than that.
    arena.grow_to(_with_room(plan))
    return arena


def _with_room(plan: Plan) -> int:
    """Bytes for what a plan moves, and as much more as it may need and the budget allows."""
    moves = sum(
        len(plan.variants[s.variant].offloaded) for s in plan.segments if s.variant is not None
    )
    ample = int(ROOM * plan.host_bytes) + GRAIN * (moves + len(plan.segments))
    if plan.host_budget_bytes is None:
        return ample
    return min(ample, plan.host_budget_bytes // GRAIN * GRAIN)


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
