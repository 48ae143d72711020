"""Find the segments of a workload, with in-place modules made safe where they stand in the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfit.capture.discover import discover
from memfit.capture.segments import Segment, choose_segments
from memfit.errors import ModelError
from memfit.runtime.calls import named_modules
from memfit.runtime.inplace import inplace_modules, inplace_off
from memfit.runtime.random_state import RandomState
from memfit.workload import Workload


def find_segments(
    workload: Workload,
    patterns: Sequence[str] | None = None,
    *,
    hidden: bool = False,
    loss: bool = False,
) -> tuple[tuple[Segment, ...], tuple[str, ...]]:
    """Return the segment calls, and the modules whose `inplace` must be off to recompute them.

    A segment that begins by changing its own input in place cannot be repeated from that input.
    Where a module with `inplace=True` does it, switching that off makes the segment safe, unless
    somebody reads the changed input: then the loss is another, and the segment stays as it is.
    Single layers are left alone: inside a run they are safe as they are. Calls whose memory cannot
    be planned, in checkpoints of the user's own or under no_grad, are left out unless `hidden`.
    With `loss`, the cross-entropy is a segment, too.
    """
    random = RandomState.of([workload.device])
    found = discover(workload, loss=loss)
    segments = choose_segments(found, patterns, hidden=hidden)
    if not segments and found.root.children:
        raise ModelError(
            "everything runs under no_grad, in torch.utils.checkpoint or in other hooks on saved "
            "tensors, so there is nothing to plan",
            hint="take them out: memfit decides by itself what is recomputed or moved",
        )
    if not segments:
        raise ModelError(
            "the step calls no module of the model, so there is nothing to plan",
            hint="loss_fn must run the model's modules by calling them: model(batch)",
        )
    pinned = {s.visit.module for s in segments if s.pinned and not s.visit.leaf}
    modules = named_modules(workload.model, pinned)
    names = [
        f"{outer}.{inner}" if inner else outer
        for outer in sorted(pinned)
        for inner in inplace_modules(modules[outer])
    ]
    if not names:
        return segments, ()
    with inplace_off(workload.model, names), random.replayed():
        changed = discover(workload, loss=loss)
    if not torch.allclose(changed.loss, found.loss, rtol=1e-6, atol=0, equal_nan=True):
        return segments, ()
    safe = choose_segments(changed, patterns, hidden=hidden)
    freed = pinned - {s.visit.module for s in safe if s.pinned}
    kept = tuple(n for n in names if any(n == o or n.startswith(o + ".") for o in freed))
    return (safe, kept) if kept else (segments, ())
