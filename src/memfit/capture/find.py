"""Find the segments of a workload, with in-place modules made safe where they stand in the way."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.capture.discover import discover
from memfit.capture.segments import Segment, choose_segments
from memfit.errors import ModelError
from memfit.runtime.inplace import inplace_modules, inplace_off
from memfit.workload import Workload, unwrap


def find_segments(
    workload: Workload, patterns: Sequence[str] | None = None
) -> tuple[tuple[Segment, ...], tuple[str, ...]]:
    """Return the segment calls, and the modules whose `inplace` must be off to recompute them.

    A segment that begins by changing its own input in place cannot be repeated from that input.
    Where a module with `inplace=True` does it, switching that off makes the segment safe. Single
    layers are left alone: inside a run they are safe as they are.
    """
    segments = choose_segments(discover(workload), patterns)
    if not segments:
        raise ModelError(
            "the step calls no module of the model, so there is nothing to plan",
            hint="loss_fn must run the model's modules by calling them: model(batch)",
        )
    pinned = {s.visit.module for s in segments if s.pinned and not s.visit.leaf}
    modules = dict(unwrap(workload.model).named_modules())
    names = [
        f"{outer}.{inner}" if inner else outer
        for outer in sorted(pinned)
        for inner in inplace_modules(modules[outer])
    ]
    if not names:
        return segments, ()
    with inplace_off(workload.model, names):
        safe = choose_segments(discover(workload), patterns)
    freed = pinned - {s.visit.module for s in safe if s.pinned}
    kept = tuple(n for n in names if any(n == o or n.startswith(o + ".") for o in freed))
    return (safe, kept) if kept else (segments, ())
