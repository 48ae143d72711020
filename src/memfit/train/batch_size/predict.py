"""From the sizes that were run to the next one worth running. Arithmetic only.

Forward and backward grow with the batch, the optimizer's own peak hardly does: while it is the
higher one the peak of the whole step says nothing about larger batches, so each has its curve.
Curves go through the largest sizes: a straight line, or a parabola where they bend upwards (a loss
that compares every sample with every other). Jumps between two sizes are met by the next run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from memfit.ir.batch_size import BatchTrial

MAX_RUNS = 5
FIRST_SIZE = 2  # a batch of one is a case of its own: fewer copies, and no batch-norm
SECOND_SIZE = 8
WORTH_A_RUN = 1.01  # how much larger a batch must be
STEP_BACK = 0.95  # of a size that just failed
LAST_RUN = 0.985  # of the prediction: there is no other run to mend it
NEARLY = 1.03  # a prediction so far above the budget may be wrong: the next size is tried
LIVE_SHARE = 0.985  # of the budget: an allocator under a cap finds room for so many live bytes
CLEARLY_WRONG = 1.1  # a prediction so far above a size that failed is of no use

Point = tuple[int, int]


def next_size(trials: Sequence[BatchTrial], budget_bytes: int, max_size: int) -> int | None:
    """The size to run next; None when the largest that held cannot be bettered."""
    if not trials:
        return min(FIRST_SIZE, max_size)
    held = max((t.size for t in trials if t.holds), default=0)
    failed = min((t.size for t in trials if not t.holds), default=max_size + 1)
    if held + 1 >= failed or len(trials) >= MAX_RUNS:
        return None
    if len(trials) == 1:
        return min(SECOND_SIZE, max_size) if held else 1
    predicted = largest_size(trials, budget_bytes, max_size)
    if len(trials) == 2 and failed > max_size and predicted // 3 > held:
        return predicted // 3
    if predicted <= WORTH_A_RUN * held:
        predicted = largest_size(trials, budget_bytes, max_size, straight=True)
    if predicted >= failed:  # the machine disagrees, and does not say by how much
        again = sum(not t.holds for t in trials) > 1 or predicted > CLEARLY_WRONG * failed
        near = math.isqrt(held * failed) if again else int(STEP_BACK * failed)
        return max(near, held + 1)
    last = len(trials) == MAX_RUNS - 1
    if last:
        predicted = round(LAST_RUN * predicted)
    # Under a cap the allocator may hold more than it needs: what is live says what might do.
    if last or predicted <= WORTH_A_RUN * held:
        predicted = max(predicted, _hopeful(trials, budget_bytes, held, failed))
    return predicted if predicted > WORTH_A_RUN * held else None


def _hopeful(trials: Sequence[BatchTrial], budget_bytes: int, held: int, failed: int) -> int:
    """The size to try beyond `held` where predictions are spent; below `failed`."""
    largest = largest_size(trials, int(LIVE_SHARE * budget_bytes), failed - 1, of=live_bytes)
    if any(not trial.holds for trial in trials):  # it has been tried, or its like
        largest = min(largest, math.isqrt(held * failed))
    more = held + 1
    may_hold = (
        predicted_bytes(trials, more) <= NEARLY * budget_bytes
        or live_bytes(trials, more) <= budget_bytes
    )
    return max(largest, more if may_hold else 0)


def largest_size(
    trials: Sequence[BatchTrial],
    budget_bytes: int,
    max_size: int,
    *,
    of: Callable[..., float] | None = None,
    straight: bool = False,
) -> int:
    """The largest batch whose bytes (what counts, unless said) are within the budget; 0: none."""
    bytes_of = of or predicted_bytes
    fits, too_large = 0, max_size + 1
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if bytes_of(trials, middle, straight=straight) <= budget_bytes:
            fits = middle
        else:
            too_large = middle
    return fits


def predicted_bytes(trials: Sequence[BatchTrial], size: int, *, straight: bool = False) -> int:
    """The bytes that count against a budget, for a batch of this size."""
    ran = _measured(trials)
    live = live_bytes(trials, size, straight=straight)
    # What the allocator holds beyond live bytes grows at most as they do.
    last = max((t for t in ran if t.holds), key=lambda t: t.size, default=ran[-1])
    return math.ceil(live * (last.peak_reserved_bytes or 0) / (last.peak_bytes or 1))


def live_bytes(trials: Sequence[BatchTrial], size: int, *, straight: bool = False) -> float:
    """The live bytes of a batch of this size."""
    ran = _measured(trials)
    backward = [(t.size, t.backward_peak_bytes or 0) for t in ran]
    whole = [(t.size, t.peak_bytes or 0) for t in ran]
    grown = (extrapolate if straight else _curve)(backward, size)
    return max(grown, extrapolate(whole, size))


def _measured(trials: Sequence[BatchTrial]) -> list[BatchTrial]:
    ran = sorted((t for t in trials if t.peak_bytes is not None), key=lambda t: t.size)
    assert ran, "nothing was measured"
    return ran


def extrapolate(points: Sequence[Point], size: int) -> float:
    """The straight line through the last two points, at `size`."""
    if len(points) == 1:
        return points[0][1]
    (x0, y0), (x1, y1) = points[-2:]
    return y1 + (y1 - y0) / (x1 - x0) * (size - x1)


def _curve(points: Sequence[Point], size: int) -> float:
    line = extrapolate(points, size)
    if len(points) < 3:
        return line
    before, after = ((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points[-3:]))
    bend = (after - before) / (points[-1][0] - points[-3][0])
    return line + max(bend, 0) * (size - points[-1][0]) * (size - points[-2][0])
