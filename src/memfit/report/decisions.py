"""A plan tensor by tensor: what happens to every activation of the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from memfit.ir.plan import KEEP, OFFLOAD, RECOMPUTE, ActivationPlan, Plan, SegmentPlan

Row = dict[str, str | int | float]

WORDS = {KEEP: "RETAINED", RECOMPUTE: "RECOMPUTE", OFFLOAD: "SWAP"}

DECISION_COLUMNS = (
    "activation_name",
    "decision",
    "median_mem_size_bytes",
    "recomp_time_s",
    "creation_rank",
    "first_bw_use_rank",
)


def decision_rows(plan: Plan) -> Iterator[Row]:
    """One row per activation in the order of the step; its columns are DECISION_COLUMNS."""
    for row in explained_rows(plan):
        yield {name: row[name] for name in DECISION_COLUMNS}


def explained_rows(plan: Plan) -> Iterator[Row]:
    """The decision rows with the segment call, its class and the reason.

    Ranks are those of a profile's tables: the operators of all forwards as they are called, then
    of all backwards in reverse; a segment that was not captured is one operator in each. -1: made
    before the segment; not read by its backward.
    """
    forward, backward = _starts(plan)
    for index, segment in enumerate(plan.segments):
        captured = segment.variant is not None
        for tensor in activations(plan, segment):
            # Without a joint graph the ranks are positions in memory, not operators.
            created = tensor.creation_rank if captured else 0
            first_use = (
                tensor.first_backward_rank if captured else min(tensor.first_backward_rank, 0)
            )
            decision = _decision(plan, index, tensor)
            whole = decision == RECOMPUTE and segment.decision == RECOMPUTE
            yield {
                "activation_name": f"{segment.name}/{tensor.name}",
                "decision": WORDS[decision],
                "median_mem_size_bytes": tensor.bytes,
                "recomp_time_s": segment.recompute_s if whole else tensor.recompute_s,
                "creation_rank": created if created < 0 else forward[index] + created,
                "first_bw_use_rank": first_use if first_use < 0 else backward[index] + first_use,
                "segment": segment.name,
                "class": segment.kind,
                "reason": segment.reason if whole else tensor.reason,
            }


def activations(plan: Plan, segment: SegmentPlan) -> tuple[ActivationPlan, ...]:
    """The tensors of a segment call that its backward needs."""
    if segment.variant is None:
        return segment.activations
    return plan.variants[segment.variant].activations


def tensor_counts(plan: Plan) -> Counter[str]:
    """How many activations of the step meet each decision."""
    return Counter(
        _decision(plan, index, tensor)
        for index, segment in enumerate(plan.segments)
        for tensor in activations(plan, segment)
    )


def _decision(plan: Plan, index: int, tensor: ActivationPlan) -> str:
    """What happens to a tensor: by its variant, or by the run its call belongs to."""
    segment = plan.segments[index]
    if segment.decision != RECOMPUTE:
        return tensor.decision
    # A run goes on from what enters its first call; what enters the others it makes itself.
    begins_run = index == 0 or plan.segments[index - 1].run != segment.run
    made_outside = segment.variant is not None and tensor.creation_rank < 0
    return KEEP if begins_run and made_outside else RECOMPUTE


def _starts(plan: Plan) -> tuple[list[int], list[int]]:
    """The rank at which each segment call's forward begins, and its backward."""
    variants = [None if s.variant is None else plan.variants[s.variant] for s in plan.segments]
    forward = list(accumulate((1 if v is None else v.forward_ranks for v in variants), initial=0))
    counts = [1 if v is None else v.backward_ranks for v in variants]
    after = list(accumulate(reversed(counts), initial=forward[-1]))
    return forward[:-1], after[-2::-1]
