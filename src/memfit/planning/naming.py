"""What a tensor of the step is called, which module makes it, and the line of code behind it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from memfit.ir.joint_graph import JointGraph, Node, Span, Variant
from memfit.ir.source import Source
from memfit.ir.step_graph import Block, Call
from memfit.planning.clock import backward_end
from memfit.planning.segment.passes import saved_storages, variant_of
from memfit.planning.simulate import Simulator
from memfit.units import format_bytes

MOST_INSIDE = 4  # tensors of a moment that are named
INSIDE = "inside "  # begins the name of what a segment needs for a moment
SMALLER = "smaller pieces"  # of what a segment holds
_BY_CATEGORY = {"gradients": "gradient", "activations": "activation", "temporaries": "temporary"}
NOT_KNOWN = (*_BY_CATEGORY.values(), SMALLER)  # names that tell no operator


@dataclass(frozen=True)
class Named:
    """A tensor's name and where it comes from; empty where that is not known."""

    name: str
    module: str
    source: str = ""
    shape: str = ""
    file: str = ""
    line: int = 0


class Names:
    """The names of one step's blocks and of its segments' own tensors."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self._nodes = dict(_nodes_of_blocks(simulator))
        self._inside: dict[tuple[int, tuple[int, ...]], tuple[str, str]] = {}

    def block(self, number: int, suffix: str = "") -> Named:
        """A block of the step, by the operator that made it."""
        block = self.simulator.graph.blocks[number]
        if number in self._nodes:
            named = _of_node(*self._nodes[number])
        else:
            call = _maker(self.simulator, block)
            source = Source.read(call.source) if call is not None else Source()
            where = (source.line_words, "", source.file, source.line)
            named = Named(_plain_name(block), "" if call is None else call.name, *where)
        return replace(named, name=named.name + suffix)

    def own(self, call: Call, nodes: Collection[int], suffix: str) -> list[tuple[Named, int]]:
        """What these nodes hold that is a captured call's alone, with its bytes, largest first."""
        graph = self.simulator.profile.graphs[call.graph]
        shared = {
            s
            for i, node in enumerate(graph.nodes)
            if node.role == "input" or i in graph.outputs
            for s in node.storages
        }
        found = []
        for storage in saved_storages(graph, nodes) - shared:
            named = _of_node(call, graph, graph.nodes[graph.storages[storage].maker])
            size = graph.storages[storage].bytes
            found.append((replace(named, name=named.name + suffix), size))
        return sorted(found, key=lambda part: -part[1])

    def inside(self, call: Call, variant: Variant, what: str) -> Named:
        """A moment inside one of a captured call's graphs, with its largest tensors."""
        key = (call.graph, variant.saved)
        if key not in self._inside:
            graph = self.simulator.profile.graphs[call.graph]
            self._inside[key] = _largest_inside(graph, variant.saved)
        largest = self._inside[key][what.startswith("backward")]
        return Named(f"{INSIDE}{what}", call.name, f"largest: {largest}" if largest else "")


def _nodes_of_blocks(sim: Simulator) -> list[tuple[int, tuple[Call, JointGraph, Node]]]:
    """For blocks that captured calls make, the call and the operator."""
    found = []
    for call in sim.graph.calls:
        for name, block in call.held.items() if call.graph >= 0 else ():
            graph = sim.profile.graphs[call.graph]
            if block < 0 or sim.graph.blocks[block].call != call.index or name not in graph.index:
                continue
            storages = graph.nodes[graph.index[name]].storages
            if storages:
                maker = graph.nodes[graph.storages[storages[0]].maker]
                found.append((block, (call, graph, maker)))
    return found


def _largest_inside(graph: JointGraph, saved: tuple[int, ...]) -> tuple[str, str]:
    """The largest tensors at the peaks of a variant's forward and of its backward, in words."""
    variant = variant_of(graph, saved)
    forward, backward = (_at_peak(spans) for spans in (variant.forward, variant.backward))
    return _in_words(graph, forward), _in_words(graph, backward)


def _at_peak(spans: Iterable[Span]) -> list[Span]:
    """Of the spans that begin inside a pass, those alive when all together are the most."""
    found = list(spans)
    length = 1 + max((max(s.birth, s.death) for s in found), default=0)
    change = [0] * (length + 1)
    for span in found:
        change[max(span.birth, 0)] += span.bytes
        change[span.death if span.death >= 0 else length] -= span.bytes
    totals = list(accumulate(change))
    peak = totals.index(max(totals))
    return [s for s in found if 0 <= s.birth <= peak and (s.death < 0 or peak < s.death)]


def _in_words(graph: JointGraph, spans: Iterable[Span]) -> str:
    known = [s for s in spans if 0 <= s.storage < len(graph.storages)]
    largest = sorted(known, key=lambda span: -span.bytes)[:MOST_INSIDE]
    words = []
    for span in largest:
        node = graph.nodes[graph.storages[span.storage].maker]
        place = Source.read(node.source).place
        line = f" ({place})" if place else ""
        words.append(f"{node.name} {format_bytes(span.bytes)}{line}")
    return ", ".join(words)


def _of_node(call: Call, graph: JointGraph, node: Node) -> Named:
    source = Source.read(node.source)
    name = f"input {node.name}" if node.role == "input" else node.name
    module = ".".join(filter(None, (call.name, source.module)))
    return Named(name, module, source.line_words, node.shape, source.file, source.line)


def _plain_name(block: Block) -> str:
    """What can be said of a block that no captured graph knows."""
    return block.operator or _BY_CATEGORY.get(block.category, block.category)


def _maker(sim: Simulator, block: Block) -> Call | None:
    """The call whose forward or backward makes a block; None between segments."""
    calls = sim.graph.calls
    if block.call >= 0:
        return calls[block.call]
    within = (c for c in calls if 0 <= c.need <= block.birth < backward_end(c))
    return next(within, None)
