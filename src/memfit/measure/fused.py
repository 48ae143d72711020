"""What inductor fuses into one loop, and the bytes that such code moves.

Fused operators hand their results on in registers, so the bytes that single operators move say
little. What counts is what has to be written for others, and what is read from memory: once in
every pass over it.
"""

from __future__ import annotations

import torch
from torch import fx

# Fused by inductor, an elementwise operator moves about a quarter of the bytes it would move
# alone: its inputs and results mostly stay in registers between it and its neighbours. (But what
# others read is written: `bytes_fused`.)
FUSION_FACTOR = 0.25
_MOVING = (
    "clone",
    "_to_copy",
    "convert_element_type",
    "full",
    "full_like",
    "iota",
    "where",
    "inductor_random",
    "inductor_randint",
    "inductor_lookup_seed",
    "constant_pad_nd",
    "select_scatter",
    "slice_scatter",
)
# Over so many numbers a reduction and what reads its result are one loop: they stay on the chip.
_SHORT = 8192
_REDUCING = ("sum", "mean", "prod", "amax", "amin", "max", "min", "var", "var_mean", "any", "all")


def is_elementwise(node: fx.Node) -> bool:
    """Whether inductor fuses the operator with its neighbours: pointwise, view or cast."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return False
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return True
    if is_view(node):
        return True
    return schema.name.partition("::")[2] in _MOVING


def is_fused(node: fx.Node) -> bool:
    """Whether inductor makes it in one loop with what it reads: elementwise, or a reduction."""
    return is_elementwise(node) or getattr(node.target, "_opname", "") in _REDUCING


def is_view(node: fx.Node) -> bool:
    """Whether the operator shows memory of another one."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def bytes_of(node: fx.Node) -> int:
    """Bytes of the tensor."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def bytes_fused(forward: fx.GraphModule, backward: fx.GraphModule) -> dict[str, float]:
    """Bytes that elementwise operators move when inductor fuses them.

    What operators of the backward read that are not fused, such as products of matrices, has to be
    written when it is made again. So have inputs to be read for it that nothing else in fused code
    reads, such as weights that are cast.
    """
    own = {node.name for node in forward.graph.nodes}
    written: set[str] = set()
    read: set[str] = set()
    for node in backward.graph.nodes:
        if node.op == "call_function" and node.name not in own:
            readers = read if is_fused(node) else written
            readers.update(_behind_views(n).name for n in node.all_input_nodes)
    written = {_behind_views(n).name for n in forward.graph.nodes if n.name in written}
    found: dict[str, float] = {}
    for node in (*backward.graph.nodes, *forward.graph.nodes):
        if not is_elementwise(node):
            continue
        size = FUSION_FACTOR * _bytes_moved(node)
        if size and node.name in written:
            alone = [n for n in map(_behind_views, node.all_input_nodes) if _only(n, read)]
            size += (1 - FUSION_FACTOR) * sum(map(bytes_of, (node, *alone)))
        found[node.name] = size
    return found


def bytes_read_more(forward: fx.GraphModule, backward: fx.GraphModule) -> dict[str, int]:
    """For what the backward is handed, the bytes that its fused code reads more without it.

    It then makes the value from what that is made of, in every pass over it: the mask of a ReLU,
    one byte a number, from its output, four. What is written for others as well need not be read
    where what it is made of is (`runtime/compile/apart.py`): negative.
    """
    passes = _passes(backward)
    handed = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    found: dict[str, int] = {}
    for node in forward.graph.nodes:
        times = passes.get(node.name, 0)
        if not times or not is_elementwise(node) or is_view(node):
            continue
        others = [n for n in _made_of(node, handed) if not passes.get(n.name, 0)]
        more = times * (sum(map(bytes_of, others)) - bytes_of(node))
        if all(user.op == "output" for user in node.users):
            more -= bytes_of(node)  # nor does the forward write it
        apart = not all(is_fused(n) and not is_view(n) for n in handed[node.name].users)
        found[node.name] = min(more, 0) if apart else max(more, 0)
    return found


def _passes(backward: fx.GraphModule) -> dict[str, int]:
    """How many loops of the backward read each of its inputs.

    Loops that need the results of one another, as those on both sides of a long reduction do,
    cannot be one; others are taken to be.
    """
    rank: dict[fx.Node, int] = {}
    for node in backward.graph.nodes:
        ranks = (rank[n] + _ends_a_loop(n) for n in node.all_input_nodes)
        rank[node] = max(ranks, default=0)
    found: dict[str, int] = {}
    for node in backward.graph.find_nodes(op="placeholder"):
        loops: set[int] = set()
        shown = {node}  # the node and views of it: these are read as they are
        stack, seen = [node], {node}
        while stack:
            at = stack.pop()
            for user in at.users:
                if not is_elementwise(user):
                    if is_fused(user) or at not in shown:
                        loops.add(rank[at])
                elif user not in seen:
                    seen.add(user)
                    stack.append(user)
                    if at in shown and is_view(user):
                        shown.add(user)
        found[node.name] = len(loops)
    return found


def _ends_a_loop(node: fx.Node) -> bool:
    """Whether no loop can make the node and read it."""
    if node.op != "call_function" or is_elementwise(node):
        return False
    count = _count(node)
    if not is_fused(node) or not count:
        return True
    return max(map(_count, node.all_input_nodes), default=0) > _SHORT * count


def _count(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _made_of(node: fx.Node, handed: dict[str, fx.Node]) -> set[fx.Node]:
    """What fused code would make the value from: inputs, what is handed over, what is returned."""
    found: set[fx.Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        at = stack.pop()
        returned = any(user.op == "output" for user in at.users)
        if at.name in handed or returned or not is_elementwise(at):
            found.add(at)
        else:
            stack.extend(at.all_input_nodes)
    return found


def _bytes_moved(node: fx.Node) -> int:
    """Bytes that the operator alone reads and writes; none for a view."""
    return 0 if is_view(node) else sum(map(bytes_of, (*node.all_input_nodes, node)))


def _only(node: fx.Node, read: set[str]) -> bool:
    """Whether the node comes from outside and fused code of the backward does not read it."""
    return node.op == "placeholder" and node.name not in read


def _behind_views(node: fx.Node) -> fx.Node:
    """The node whose memory it shows."""
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
