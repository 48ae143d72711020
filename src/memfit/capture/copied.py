"""Inputs that compiled code copies: it hands them to its backward in a layout that it prefers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memfit.ir.joint_graph import INPUT_ROLES, JointGraph
from memfit.ir.step_graph import StepGraph


def with_copies(graphs: Sequence[JointGraph], step: StepGraph) -> tuple[JointGraph, ...]:
    """The joint graphs with what a recorded call of each handed to its backward as a copy."""
    copied: list[set[int]] = [set() for _ in graphs]
    for call in step.calls:
        if call.graph < 0:
            continue
        graph = graphs[call.graph]
        for name, block in call.held.items():
            node = graph.index.get(name)
            if node is None or graph.nodes[node].role not in INPUT_ROLES:
                continue
            if block >= 0 and call.enter < step.blocks[block].birth <= call.exit:
                copied[call.graph].add(node)
    return tuple(
        replace(graph, copied=tuple(sorted(nodes))) if nodes else graph
        for graph, nodes in zip(graphs, copied, strict=True)
    )
