"""What the planner would do on other GPUs: a measured profile, scaled by published numbers.

Assumed, and measured by nobody: products, convolutions and attention take as much longer as the
peak rate of the tensor cores is lower, everything else as much longer as memory is slower; copies
reach the share of their bus's rate that they reach here; starting a copy takes as long as here.
That the step might not fit on the other GPU does not matter: the budget is that of the measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import say

from memfit.ir.joint_graph import JointGraph
from memfit.ir.profile import CallTime, CopyRates, Measurements, Profile
from swapping.pays import STRATEGIES, plan_all, predicted, read_profile
from swapping.session import Session


@dataclass(frozen=True)
class Card:
    """Published peak rates: dense 16-bit products, memory, and one direction of the bus."""

    flop_per_s: float
    memory_bytes_per_s: float
    bus_bytes_per_s: float
    source: str


# PCIe: transfers per second x 16 lanes x 128/130.
H200 = Card(989e12, 4.8e12, 63.0e9, "NVIDIA H200 SXM: bf16, HBM3e, PCIe 5 x16")
CARDS = {
    "RTX 4090": Card(165.2e12, 1.008e12, 31.5e9, "bf16 with fp32 sums, GDDR6X, PCIe 4 x16"),
    "T4": Card(65e12, 0.32e12, 15.75e9, "fp16 (it has no bf16), GDDR6, PCIe 3 x16"),
}
_PRODUCTS = ("mm.", "addmm.", "bmm.", "baddbmm.", "convolution", "attention")
_LAYERS = ("Linear", "Conv2d", "Conv1D")


def run(_: Session, profile_file: Path, card_name: str, budget: int, host: int) -> dict[str, Any]:
    """All strategies for one profile on one card."""
    card = CARDS[card_name]
    profile = scaled(read_profile(profile_file), card)
    say(f"  {card_name}: {profile.step_s * 1e3:.0f} ms a step")
    found = plan_all(profile, budget, host)
    rows: dict[str, dict[str, Any]] = {}
    for key in STRATEGIES:
        if key in found.plans:
            rows[key] = predicted(found.plans[key])
        else:
            rows[key] = {"error": found.refused[key]}
    return {
        "simulated": True,
        "assumed": f"{card_name}: {card.source}; scaled from {H200.source}",
        "budget_bytes": budget,
        "unplanned_step_s": profile.step_s,
        "copy": None if profile.copy is None else vars(profile.copy),
        "systems": rows,
    }


def scaled(profile: Profile, card: Card) -> Profile:
    """The profile as it might be on another card."""
    products = H200.flop_per_s / card.flop_per_s
    memory = H200.memory_bytes_per_s / card.memory_bytes_per_s
    graphs = [_slower(graph, products, memory) for graph in profile.graphs]
    factors = [
        graphs[call.graph][1] if call.graph >= 0 else (products if call.kind in _LAYERS else memory)
        for call in profile.graph.calls
    ]
    times = tuple(
        CallTime(t.forward_s * f, t.backward_s * f, t.recompute_s * f, t.recompute_host_s)
        for t, f in zip(profile.call_times, factors, strict=True)
    )
    inside = profile.accumulate * sum(t.forward_s + t.backward_s for t in profile.call_times)
    after = profile.accumulate * sum(t.forward_s + t.backward_s for t in times)
    step_s = after + memory * max(profile.step_s - inside, 0.0)
    known = profile.known or (Measurements(),) * len(graphs)
    return replace(
        profile,
        graphs=tuple(graph for graph, _ in graphs),
        call_times=times,
        step_s=step_s,
        # The host is as fast as before, and the device slower: more vanishes behind it.
        host_slack_s=profile.host_slack_s + max(step_s - profile.step_s, 0.0),
        baseline=None if profile.baseline is None else replace(profile.baseline, step_s=step_s),
        copy=_copies(profile.copy, card, memory),
        known=tuple(
            replace(
                seen,
                variants=tuple(replace(v, seconds=v.seconds * f) for v in seen.variants),
            )
            for seen, (_, f) in zip(known, graphs, strict=True)
        ),
    )


def _slower(graph: JointGraph, products: float, memory: float) -> tuple[JointGraph, float]:
    """The graph with longer seconds, and by how much it takes longer as a whole."""
    nodes = tuple(
        replace(
            node,
            seconds=node.seconds * (products if any(p in node.op for p in _PRODUCTS) else memory),
        )
        for node in graph.nodes
    )
    before, after = (sum(n.seconds for n in some) for some in (graph.nodes, nodes))
    return replace(graph, nodes=nodes), after / before if before > 0 else products


def _copies(copy: CopyRates | None, card: Card, memory: float) -> CopyRates | None:
    if copy is None:
        return None
    bus = card.bus_bytes_per_s / H200.bus_bytes_per_s
    return replace(
        copy,
        out_bytes_per_s=copy.out_bytes_per_s * bus,
        in_bytes_per_s=copy.in_bytes_per_s * bus,
        # A copy takes its share of the memory's rate from what runs beside it.
        drag=copy.drag if copy.drag >= 1 else min(copy.drag * bus * memory, 0.5),
    )
