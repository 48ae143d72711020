"""What inductor makes of a plan's graphs on a GPU."""

from __future__ import annotations

from dataclasses import replace

import memfit
from memfit.ir.joint_graph import JointGraph
from memfit.measure.step import run_backward, untouched
from memfit.planning.acts import Pick
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.simulate import Simulator
from memfit.planning.write_plan import write_segments
from memfit.runtime.apply import Applied
from memfit.targets import resolve_target

WIDE = {"n_layer": "2", "n_embd": "1280", "n_head": "20", "vocab_size": "4000"}
RUNS = 4


def test_a_norm_that_hands_over_what_it_made_repeats_itself() -> None:
    """One loop of the norm's kernel reads what an earlier one stored: it must wait for it."""
    workload = resolve_target(
        "transformers:gpt2", device="cuda", batch=8, seq=1024, dtype="bf16", overrides=WIDE
    )
    profile = memfit.profile(workload, executor="inductor")
    call = next(c for c in profile.graph.calls if c.graph >= 0)
    simulator = Simulator(profile)
    everything = simulator.offer(call.graph, read_by_backward(profile.graphs[call.graph]), [])
    acts = tuple(Pick(c.index, everything) for c in profile.graph.calls if c.graph == call.graph)
    segments, variants = write_segments(simulator, acts)
    plan = replace(make_plan(profile, Goal(strategy="none")), segments=segments, variants=variants)

    def loss(plan: memfit.Plan) -> float:
        with untouched(workload), Applied(plan, workload.model):
            made = workload.compute_loss()
            run_backward(workload, made)
            return made.item()

    losses = {loss(plan) for _ in range(RUNS)}
    assert len(losses) == 1
    assert abs(losses.pop() - loss(plan.unplanned())) < 1e-3


def read_by_backward(graph: JointGraph) -> list[int]:
    """What the backward reads of the forward; of a view the tensor it is a view of."""
    read = {i for node in graph.nodes if node.role == "backward" for i in node.inputs}
    saved: set[int] = set()
    while read:
        number = read.pop()
        node = graph.nodes[number]
        if node.role not in ("forward", "input"):
            continue
        if node.can_save:
            saved.add(number)
        else:
            read.update(node.inputs)
    return sorted(saved)
