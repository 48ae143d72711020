"""How few bytes each way to run a traced step could do with.

Bounds, not plans: nothing is solved here. What recompute leaves is read off the trace (every
segment drops what it saved); the rest takes away what would lie in host memory.
"""

from __future__ import annotations

from memfit.estimating.history import History
from memfit.ir.estimate import Needs

# A segment that is stepped has its gradients here, and state of twice their size as Adam keeps it.
STEPPED_COPIES = 3


def needs_of(history: History, tiled: History | None, largest_parameters: int) -> Needs:
    """The peak of each way; `largest_parameters` are the most bytes that one segment has.

    `tiled` is the same step with its loss in tiles, where it can be made so.
    """
    on_host, stepped = _without_optimizer(history, largest_parameters)
    recomputed = int(history.recomputed.max())
    in_tiles, everything = recomputed, stepped
    if tiled is not None:
        in_tiles = min(recomputed, int(tiled.recomputed.max()))
        everything = min(stepped, *_without_optimizer(tiled, largest_parameters))
    return Needs(
        plain_bytes=int(history.total.max()),
        recompute_bytes=recomputed,
        tiled_loss_bytes=in_tiles,
        optimizer_on_host_bytes=on_host,
        step_in_backward_bytes=stepped,
        all_bytes=everything,
    )


def _without_optimizer(history: History, largest_parameters: int) -> tuple[int, int]:
    """The peak with the optimizer's state on the host, and with its step in backward, too."""
    made = history.in_phases(("forward", "backward"))
    parts = history.categories
    on_host = history.recomputed - parts["optimizer_state"]
    stepped = on_host - parts["gradients"]
    on_host_bytes = int(on_host[made].max())
    stepped_bytes = int(stepped[made].max()) + STEPPED_COPIES * largest_parameters
    # Where the peak lies before there are gradients, nobody has to step in backward.
    return on_host_bytes, min(on_host_bytes, stepped_bytes)
