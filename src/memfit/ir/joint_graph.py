"""JointGraph: the forward and backward of one segment as operators on tensors; and its variants.

Nodes stand in the order they were traced: inputs, forward operators, tangents, backward operators.
A node's name is its id: it is given when the segment is captured and never changes. Memory is
counted by storage: views and aliases of a tensor share one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

INPUT_ROLES = ("parameter", "input")  # parameters, buffers and constants; activations passed in


@dataclass(frozen=True)
class Node:
    """One value of the graph and the operator that makes it.

    `role` is "parameter" or "input", "forward", "tangent" or "backward".
    `forward` nodes do not depend on tangents. `storages` are alive as long as the value is.
    `can_save`: it may be handed to the backward (a view never: its base is). `can_recompute`: it
    may run again in backward; `state_bytes` is what that keeps (a generator's state).
    """

    name: str
    op: str
    role: str
    inputs: tuple[int, ...] = ()
    storages: tuple[int, ...] = ()
    bytes: int = 0
    shape: str = ""  # e.g. "float32[8, 128, 768]"
    can_save: bool = False
    can_recompute: bool = False
    random: bool = False
    state_bytes: int = 0
    seconds: float = 0.0
    workspace_bytes: int = 0  # live inside the operator beside its inputs and outputs
    read_s: float = 0.0  # fused code of the backward reads so much more when it is made again
    source: str = ""  # module and line that asked for it: the text of a Source


@dataclass(frozen=True)
class Storage:
    """Memory behind one or more nodes; `maker` is the node that brings it into being."""

    bytes: int
    maker: int


@dataclass(frozen=True)
class JointGraph:
    """One distinct segment. `key` tells structure, shapes and dtypes of two graphs apart."""

    key: str
    kind: str  # the module's class
    nodes: tuple[Node, ...]
    storages: tuple[Storage, ...]
    outputs: tuple[int, ...]  # nodes the forward returns
    gradients: tuple[int, ...]  # nodes the backward returns
    unplanned: tuple[int, ...] = ()  # nodes saved when nobody decides
    # Inputs and parameters that the forward hands over as copies of its own, in another layout.
    copied: tuple[int, ...] = ()

    @cached_property
    def index(self) -> dict[str, int]:
        """Node number by name."""
        return {node.name: i for i, node in enumerate(self.nodes)}

    @cached_property
    def needed(self) -> tuple[int, ...]:
        """Forward-side nodes that backward operators read, or that are gradients themselves."""
        found = {
            i
            for node in self.nodes
            if node.role == "backward"
            for i in node.inputs
            if self.nodes[i].role not in ("backward", "tangent")
        }
        found.update(g for g in self.gradients if self.nodes[g].role in ("forward", "input"))
        return tuple(sorted(found))

    @cached_property
    def output_storages(self) -> frozenset[int]:
        """Storages that leave the segment with its outputs."""
        return frozenset(s for n in self.outputs for s in self.nodes[n].storages)

    def held_outside(self, saved: tuple[int, ...]) -> list[int]:
        """The inputs and outputs whose memory the saved nodes hold beside the segment's own."""
        storages = {s for n in saved for s in self.nodes[n].storages}
        inputs = {i for i, node in enumerate(self.nodes) if node.role == "input"}
        inputs.difference_update(self.copied)
        outside = sorted(inputs.union(self.outputs))
        return [i for i in outside if storages.intersection(self.nodes[i].storages)]

    def recomputed(self, saved: frozenset[int]) -> tuple[int, ...]:
        """Nodes the backward runs again when only `saved` and the parameters are handed to it."""
        seen: set[int] = set()
        stack = list(self.needed)
        while stack:
            node = stack.pop()
            if node in seen or node in saved or self.nodes[node].role == "parameter":
                continue
            if self.nodes[node].role == "input":
                raise ValueError(f"input {self.nodes[node].name} is needed and not saved")
            seen.add(node)
            stack.extend(self.nodes[node].inputs)
        return tuple(sorted(seen))

    @cached_property
    def returned(self) -> frozenset[int]:
        """Forward operators that the outputs depend on: the others only serve the backward."""
        seen: set[int] = set()
        stack = list(self.outputs)
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack.extend(self.nodes[node].inputs)
        return frozenset(n for n in seen if self.nodes[n].role == "forward")

    @cached_property
    def again_seconds(self) -> tuple[float, ...]:
        """What running each node in backward adds: nothing where the forward can then skip it.

        Fused code has to read what it is made of, or need not read the node itself.
        """
        return tuple(
            max((node.seconds if i in self.returned else 0.0) + node.read_s, 0.0)
            for i, node in enumerate(self.nodes)
        )

    def forward_order(self, saved: frozenset[int] | None = None) -> tuple[int, ...]:
        """Forward operators as they run; with `saved`, only those that outputs and it need."""
        if saved is None:
            return tuple(i for i, n in enumerate(self.nodes) if n.role == "forward")
        wanted = set(self.returned)
        stack = [n for n in saved if self.nodes[n].role == "forward"]
        while stack:
            node = stack.pop()
            if node not in wanted:
                wanted.add(node)
                stack.extend(i for i in self.nodes[node].inputs if self.nodes[i].role == "forward")
        return tuple(sorted(wanted))

    def backward_order(self, saved: frozenset[int]) -> tuple[int, ...]:
        """Backward operators as they run, each recomputed one as late as it can be.

        A recomputed node stands just before the first that reads it, after its own sources. All
        that is wanted of an operator's several results is taken from it at once.
        """
        again = set(self.recomputed(saved))
        order: list[int] = []
        for node, value in enumerate(self.nodes):
            if value.role != "backward":
                continue
            order.extend(self._missing(node, again))
            order.append(node)
        for node in self.gradients:  # a gradient that is a forward value
            if node in again:
                order.extend(self._missing(node, again))
            if node in again:  # not taken along with what it is a part of
                again.discard(node)
                order.append(node)
        return tuple(order)

    @cached_property
    def _parts(self) -> dict[int, list[int]]:
        """For operators with several results, the nodes that take one of them."""
        parts: dict[int, list[int]] = {}
        for i, node in enumerate(self.nodes):
            if node.op == "getitem":
                parts.setdefault(node.inputs[0], []).append(i)
        return parts

    def _missing(self, node: int, again: set[int]) -> list[int]:
        """Recomputed ancestors of `node` that have not run yet, taken out of `again`."""
        found: list[int] = []
        stack = [i for i in self.nodes[node].inputs if i in again]
        while stack:
            at = stack.pop()
            if at in again:
                again.discard(at)
                found.append(at)
                stack.extend(i for i in self.nodes[at].inputs if i in again)
                stack.extend(i for i in self._parts.get(at, ()) if i in again)
        return sorted(found)


@dataclass(frozen=True)
class Span:
    """Bytes of one storage in one pass, alive at steps birth <= t < death.

    Birth -1: there when the pass begins. Death -1: still there when it ends.
    """

    storage: int  # -1: workspace of an operator; past the graph's own: a generator's state
    bytes: int
    birth: int
    death: int


@dataclass(frozen=True)
class Variant:
    """One way to run a segment.

    `saved` are the nodes handed from forward to backward (parameters go without saying). Of what
    they hold, `held_bytes` belong to this segment alone; the rest are its inputs and outputs. The
    memory of `moved` ones waits on the host in between: `moved_bytes` of it are this segment's
    alone, and not in `held_bytes`. The two peaks are bytes above those live when the pass begins;
    `seconds` is what recomputing adds to the step.
    """

    saved: tuple[int, ...]
    recomputed: tuple[int, ...]
    held_bytes: int
    seconds: float
    forward_peak_bytes: int
    backward_peak_bytes: int
    forward: tuple[Span, ...] = field(default=(), repr=False)
    backward: tuple[Span, ...] = field(default=(), repr=False)
    moved: tuple[int, ...] = ()
    moved_bytes: int = 0
    measured: bool = False  # memory and seconds as seen on the machine, not as computed
