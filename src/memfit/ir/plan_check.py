"""What is wrong with a plan that no planner wrote: numbers out of range, names of nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memfit.ir.plan import Plan, Prediction, SegmentPlan, VariantPlan

EXECUTORS = ("graph", "inductor", "module")
COUNTS = ("reserved", "live")
DECISIONS = ("keep", "recompute", "partial", "offload")
TECHNIQUES = (
    "recompute",
    "offload",
    "step_in_backward",
    "tiled_loss",
    "optimizer_offload",
    "step_on_host",
    "optim_bf16_sr",
    "optim_8bit",
    "int8_weights",
    "int8_weights_asymmetric",
    "int8_weights_per_tensor",
    "int8_weights_asymmetric_per_tensor",
    "microbatch",
)


def fault_in(plan: Plan) -> str | None:
    """The first thing because of which the plan cannot be run by any model, or None."""
    return next(_faults(plan), None)


def _faults(plan: Plan) -> Iterator[str]:
    yield from _of_the_step(plan)
    yield from _missing_segments(plan)
    for number, variant in enumerate(plan.variants):
        yield from _of_variant(f"variants[{number}]", variant)
    for index, segment in enumerate(plan.segments):
        yield from _of_segment(f"segments[{index}] ({segment.name})", index, segment, plan)
    yield from _of_runs(plan.runs, plan.segments)


def _of_the_step(plan: Plan) -> Iterator[str]:
    yield from _negative("", plan)
    yield from _negative("predicted.", plan.predicted)
    for name in ("split", "model_calls"):
        if getattr(plan, name) < 1:
            yield f"{name} is {getattr(plan, name)}, not 1 or more"
    for name in ("budget_bytes", "tile_bytes"):
        if getattr(plan, name) == 0:
            yield f"{name} is 0"
    if not 0 < plan.baseline_step_s < math.inf:
        yield f"baseline_step_s is {plan.baseline_step_s}, not above 0"
    if not 0 <= plan.predicted.step_s < math.inf:
        yield f"predicted.step_s is {plan.predicted.step_s}, not 0 or more"
    yield from _unknown("executor", [plan.executor], EXECUTORS)
    yield from _unknown("counts", [plan.counts], COUNTS)
    yield from _unknown("techniques", plan.techniques, TECHNIQUES)


def _missing_segments(plan: Plan) -> Iterator[str]:
    if plan.route_key != plan.own_route_key:
        made, have = plan.route_key.partition("-")[0], len(plan.segments)
        yield (
            f"it has {have} segments and was made with {made}"
            if made != str(have)
            else "its segments are not those it was made with, or not in their order"
        )
    times = Counter((module, number) for module, number, _ in plan.route)
    for (module, number), found in times.items():
        if found > 1:
            yield f"call {number} of {module!r} is there {found} times"


def _of_variant(where: str, variant: VariantPlan) -> Iterator[str]:
    strangers = [name for name in variant.offloaded if name not in variant.saved]
    if strangers:
        yield f"{where} moves {strangers[0]!r} to the host, which it does not save"


def _of_segment(where: str, index: int, segment: SegmentPlan, plan: Plan) -> Iterator[str]:
    yield from _negative(f"{where}.", segment)
    yield from _unknown(f"{where}.decision", [segment.decision], DECISIONS)
    if not 0 <= segment.number < segment.visits:
        yield f"{where} is call {segment.number} of {segment.visits}"
    calls = len(plan.segments)
    if (segment.release is None) != (segment.prefetch is None):
        yield f"{where} has only one of release and prefetch"
    if segment.release is not None and not index < segment.release <= calls:
        yield f"{where}.release is {segment.release}, not between {index + 1} and {calls}"
    if segment.prefetch is not None and not 0 <= segment.prefetch <= calls:
        yield f"{where}.prefetch is {segment.prefetch}, not between 0 and {calls}"
    if segment.variant is None:
        return
    if plan.executor == "module":
        yield f"{where} runs by variant {segment.variant}, and the executor 'module' has none"
    if not 0 <= segment.variant < len(plan.variants):
        yield f"{where}.variant is {segment.variant}, and there are {len(plan.variants)} variants"
        return
    graph = plan.variants[segment.variant].graph
    if not any(v.unplanned and v.graph == graph for v in plan.variants):
        yield f"{where} runs the graph {graph!r}, of which no variant is the unplanned one"


def _of_runs(runs: Sequence[tuple[int, int]], segments: Sequence[SegmentPlan]) -> Iterator[str]:
    for first, last in runs:
        number = segments[first].run
        if any(segment.run != number for segment in segments[first : last + 1]):
            yield f"run {number} has gaps between segments {first} and {last}"


def _negative(where: str, part: Plan | Prediction | SegmentPlan) -> Iterator[str]:
    for field in fields(part):
        value = getattr(part, field.name)
        if field.name.endswith("_bytes") and value is not None and value < 0:
            yield f"{where}{field.name} is {value}, below 0"


def _unknown(where: str, words: Sequence[str], known: Sequence[str]) -> Iterator[str]:
    for word in words:
        if word not in known:
            yield f"{where} has {word!r}, which is none of {', '.join(known)}"
