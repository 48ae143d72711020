"""How few bytes each way to run a traced step could do with.

Bounds, not plans: nothing is solved here. What recompute leaves is read off the trace (every run of
segments drops what it saved, all runs of one length, of which the best counts); the rest takes away
what would lie in host memory or be freed in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memfit.estimating.history import Curve, History
from memfit.ir.estimate import Needs

Runs = Sequence[range]  # of segment calls, each recomputed as one
# A segment that is stepped has its gradients here, and state of twice their size as Adam keeps it.
STEPPED_COPIES = 3


class _Least(NamedTuple):
    """Peaks with all recomputed: so alone, and by what else happens to the optimizer."""

    alone: int
    stepped: int
    on_host: int
    on_host_stepped: int


def runs_by_length(chained: Sequence[bool]) -> list[list[range]]:
    """All segment calls in runs of 1, of 2, of 4 and so on, as long as runs become longer.

    `chained` says of each call whether a replay of the one before may go on into it.
    """
    found: list[list[range]] = []
    length = 1
    while True:
        runs: list[range] = []
        for call, follows in enumerate(chained):
            if runs and follows and len(runs[-1]) < length:
                runs[-1] = range(runs[-1].start, call + 1)
            else:
                runs.append(range(call, call + 1))
        if found and runs == found[-1]:
            return found
        found.append(runs)
        length *= 2


def needs_of(
    history: History, tiled: History | None, lengths: Sequence[Runs], largest_parameters: int
) -> Needs:
    """The peak of each way; `largest_parameters` are the most bytes that one segment has.

    `tiled` is the same step with its loss in tiles, where it can be made so.
    """
    plain = least = _least(history, lengths, largest_parameters)
    if tiled is not None:
        least = _Least(*map(min, plain, _least(tiled, lengths, largest_parameters)))
    return Needs(
        plain_bytes=int(history.total.max()),
        recompute_bytes=plain.alone,
        tiled_loss_bytes=least.alone,
        step_in_backward_bytes=plain.stepped,
        tiled_loss_step_in_backward_bytes=least.stepped,
        optimizer_on_host_bytes=plain.on_host,
        optimizer_on_host_step_in_backward_bytes=plain.on_host_stepped,
        all_bytes=least.on_host_stepped,
    )


def _least(history: History, lengths: Sequence[Runs], largest_parameters: int) -> _Least:
    """The lowest peaks that runs of any of these lengths have."""
    found = [_of(history, history.recomputed(runs), largest_parameters) for runs in lengths]
    return _Least(*map(min, *found)) if len(found) > 1 else found[0]


def _of(history: History, recomputed: Curve, largest_parameters: int) -> _Least:
    """The peaks with what is recomputed so."""
    made = history.in_phases(("forward", "backward"))
    parts = history.categories
    on_host = recomputed - parts["optimizer_state"]
    alone = int(recomputed.max())
    on_host_bytes = int(on_host[made].max())
    without_gradients = int((recomputed - parts["gradients"])[made].max())
    own = 1 + _temporaries_per_byte(history)  # the gradients of one segment, and its step's
    stepped = without_gradients + int(own * largest_parameters)
    visiting = int((on_host - parts["gradients"])[made].max()) + STEPPED_COPIES * largest_parameters
    # Where the peak lies before there are gradients, nobody has to step in backward.
    stepped = min(alone, stepped)
    return _Least(alone, stepped, on_host_bytes, min(stepped, on_host_bytes, visiting))


def _temporaries_per_byte(history: History) -> float:
    """What the optimizer's step takes for itself beside each byte of gradients."""
    stepping = history.in_phases(("optimizer",))
    gradients = int(history.categories["gradients"][stepping].max(initial=0))
    if not gradients:
        return 0.0
    before = int(history.total[int(stepping.argmax()) - 1])
    return max(0, int(history.total[stepping].max()) - before) / gradients
