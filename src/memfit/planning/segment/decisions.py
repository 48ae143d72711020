"""What an act means tensor by tensor: a decision and a reason for every activation."""

from __future__ import annotations

from collections.abc import Iterable

from memfit.ir.joint_graph import JointGraph, Variant
from memfit.ir.plan import KEEP, OFFLOAD, RECOMPUTE, ActivationPlan, VariantPlan
from memfit.ir.step_graph import Call, StepGraph
from memfit.units import format_bytes, format_seconds


def variant_plan(graph: JointGraph, variant: Variant, *, unplanned: bool) -> VariantPlan:
    """The variant with a decision for each of its activations."""
    forward = {n: rank for rank, n in enumerate(graph.forward_order())}
    backward = [i for i, node in enumerate(graph.nodes) if node.role == "backward"]
    return VariantPlan(
        graph=graph.key,
        kind=graph.kind,
        saved=tuple(graph.nodes[n].name for n in sorted(variant.saved)),
        offloaded=tuple(graph.nodes[n].name for n in sorted(variant.moved)),
        unplanned=unplanned,
        forward_ranks=len(forward),
        backward_ranks=len(backward),
        activations=tuple(_activations(graph, variant, forward, backward)),
    )


def _activations(
    graph: JointGraph, variant: Variant, forward: dict[int, int], backward: list[int]
) -> Iterable[ActivationPlan]:
    """One row per tensor that could be handed to the backward: kept ones and those it reads."""
    rank_of = {node: rank for rank, node in enumerate(backward)}
    first_use = {
        node: min((rank_of[r] for r in readers if r in rank_of), default=-1)
        for node, readers in enumerate(readers_of(graph))
    }
    saved, moved = set(variant.saved), set(variant.moved)
    again = set(variant.recomputed)
    for number, node in enumerate(graph.nodes):
        activation = node.role in ("forward", "input") and node.can_save
        wanted = number in saved or (number in again and first_use[number] >= 0)
        if not activation or not wanted:
            continue
        seconds, sources = recompute_cost(graph, number, saved)
        yield ActivationPlan(
            name=node.name,
            decision=OFFLOAD if number in moved else KEEP if number in saved else RECOMPUTE,
            bytes=node.bytes,
            recompute_s=seconds,
            creation_rank=forward.get(number, -1),
            first_backward_rank=first_use[number],
            reason=f"on the host from forward to backward: {format_bytes(node.bytes)}"
            if number in moved
            else _reason(graph, number, number in saved, seconds, sources),
        )


def readers_of(graph: JointGraph) -> list[set[int]]:
    """For each node those that read it, themselves or through a view of it."""
    readers: list[set[int]] = [set() for _ in graph.nodes]
    for number in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[number]
        for source in node.inputs:
            readers[source].add(number)
            if set(node.storages) & set(graph.nodes[source].storages):
                readers[source] |= readers[number]
    return readers


def recompute_cost(graph: JointGraph, number: int, saved: set[int]) -> tuple[float, list[int]]:
    """Seconds to make a node again from kept tensors alone, and which it then reads."""
    seconds, sources, seen, stack = 0.0, set[int](), {number}, [number]
    while stack:
        node = graph.nodes[stack.pop()]
        seconds += node.seconds
        for source in node.inputs:
            if source in saved or graph.nodes[source].role in ("parameter", "input"):
                sources.add(source)
            elif source not in seen:
                seen.add(source)
                stack.append(source)
    return seconds, sorted(sources)


def _reason(graph: JointGraph, number: int, kept: bool, seconds: float, sources: list[int]) -> str:
    node = graph.nodes[number]
    if node.role == "input":
        return "kept: the segment's input, to recompute from"
    if kept and not node.can_recompute:
        return "kept: it cannot be made twice"
    if kept:
        return f"kept: making it again would take {format_seconds(seconds)}"
    names = [graph.nodes[s].name for s in sources]
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"frees {format_bytes(node.bytes)} for {format_seconds(seconds)}, from {shown}"


def block_activations(
    graph: StepGraph, call: Call, decision: str, seconds: float, smallest_bytes: int = 0
) -> tuple[ActivationPlan, ...]:
    """The saved blocks of a call without a joint graph: all share the call's decision, but for
    those of less than `smallest_bytes`."""
    rows: list[ActivationPlan] = []
    for block in graph.blocks:
        for hold in block.holds:
            if hold.call != call.index or block.call != call.index:
                continue
            rows.append(
                ActivationPlan(
                    name=f"{block.operator or 'tensor'}_{len(rows)}",
                    decision=decision if block.bytes >= smallest_bytes else KEEP,
                    bytes=block.bytes,
                    recompute_s=seconds,
                    creation_rank=block.birth,
                    first_backward_rank=call.need,
                    reason="with its segment, which was not captured",
                )
            )
    return tuple(rows)
