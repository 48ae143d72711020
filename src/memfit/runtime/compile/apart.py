"""Let fused code of a backward make again by itself what others read, too.

What is made again for an operator that is not fused, such as a convolution, has to be written.
Inductor has fused code read it back then, wherever else it is wanted: as the mask of a ReLU, in
every pass over a batch norm's gradient. But what it is made of is read there anyway. So fused
readers get elementwise operators of their own, which stay in registers: for a block of a ResNet on
an H200 that saves from half to all of what making its ReLUs again costs.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from memfit.measure.fused import bytes_of, is_elementwise, is_fused, is_view


def make_apart(backward: fx.GraphModule, again: Collection[str]) -> int:
    """Give fused readers of what is made `again` operators of their own; how many were added."""
    added = 0
    for node in list(backward.graph.nodes):
        fused = [user for user in node.users if is_fused(user) and not is_view(user)]
        others = len(node.users) - len(fused)  # or views, and whoever reads those
        if fused and others and _in_registers(node, again) and not is_view(node):
            chain = _chain(node, again)
            if _reads_less(node, chain) and not any(map(_draws, chain)):
                added += _copy(backward.graph, node, chain, fused)
    return added


def _in_registers(node: fx.Node, again: Collection[str]) -> bool:
    return node.name in again and is_elementwise(node)


def _draws(node: fx.Node) -> bool:
    """Whether it makes random numbers, the same ones every time: that takes more than a read."""
    return getattr(node.target, "_opname", "").startswith("inductor_rand")


def _chain(node: fx.Node, again: Collection[str]) -> list[fx.Node]:
    """The node and what it is made of as far as that is elementwise and made again, in order."""
    found = {node}
    stack = [node]
    while stack:
        sources = [n for n in stack.pop().all_input_nodes if _in_registers(n, again)]
        stack.extend(n for n in sources if n not in found)
        found.update(sources)
    return [n for n in node.graph.nodes if n in found]


def _reads_less(node: fx.Node, chain: list[fx.Node]) -> bool:
    """Whether it takes less to read what the chain begins with, beyond what is read anyway."""
    inside = set(chain)
    sources = {n for link in chain for n in link.all_input_nodes} - inside
    more = [n for n in sources if not any(is_fused(u) for u in n.users if u not in inside)]
    return sum(map(bytes_of, more)) < bytes_of(node)


def _copy(graph: fx.Graph, node: fx.Node, chain: list[fx.Node], readers: list[fx.Node]) -> int:
    """Copy the chain for the readers, just before the first of them."""
    copies: dict[fx.Node, fx.Node] = {}
    wanted = set(readers)
    first = next(n for n in graph.nodes if n in wanted)
    with graph.inserting_before(first):
        for link in chain:
            copies[link] = graph.node_copy(link, lambda n: copies.get(n, n))
    for reader in readers:
        reader.replace_input_with(node, copies[node])
    return len(copies)
