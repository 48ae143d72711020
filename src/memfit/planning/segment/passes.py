"""What one saved set of a segment costs: memory of its forward and backward pass, and seconds.

Memory is followed by storage, as in `ir.joint_graph`. A storage that is saved and also made again
in the backward (another output of the same operator was asked for) is there twice: blocks are the
copies. Limits: sizes are the graph's, so what an allocator adds by fragmentation is not in here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from memfit.ir.joint_graph import INPUT_ROLES, JointGraph, Span, Variant


def variant_of(graph: JointGraph, saved: Iterable[int]) -> Variant:
    """The variant that hands `saved` from forward to backward, with its memory and its seconds."""
    kept = frozenset(n for n in saved if graph.nodes[n].role != "parameter")
    again = graph.recomputed(kept)
    forward_order, backward_order = graph.forward_order(kept), graph.backward_order(kept)
    states = _states(graph, again)
    forward = (
        *_forward_spans(graph, kept, forward_order),
        *_taken_states(graph, forward_order, states),
    )
    backward = (
        *_backward_spans(graph, kept, backward_order),
        *_restored_states(graph, backward_order, states),
    )
    at_start = sum(span.bytes for span in backward if span.birth < 0)
    own = {s for s in saved_storages(graph, kept) if not _at_boundary(graph, s)}
    parameters = _copied_parameters(graph)
    copies = parameters | {s for s in own if _maker_role(graph, s) == "input"}
    return Variant(
        saved=tuple(sorted(kept)),
        recomputed=again,
        held_bytes=storage_bytes(graph, own | parameters) + sum(states.values()),
        seconds=sum(graph.again_seconds[n] for n in again),
        forward_peak_bytes=_peak_bytes(forward, len(forward_order)) + storage_bytes(graph, copies),
        backward_peak_bytes=max(0, _peak_bytes(backward, len(backward_order)) - at_start),
        forward=forward,
        backward=backward,
    )


def backward_peak_bytes(
    graph: JointGraph, variant: Variant, *, tangents_stay: bool, freed: frozenset[int]
) -> int:
    """The variant's peak in backward where it runs in a step.

    `tangents_stay` when others hold on to the gradients it is given; outputs in `freed` (storages)
    are held by nobody else then, so they go when it has read them.
    """
    if variant.measured or not (tangents_stay or freed):
        return variant.backward_peak_bytes
    kept = frozenset(variant.saved)
    order = graph.backward_order(kept)
    given = tangent_storages(graph) if tangents_stay else frozenset()
    spans = [
        replace(span, death=-1) if span.birth < 0 and span.storage in given else span
        for span in _backward_spans(graph, kept, order, freed)
    ]
    spans += _restored_states(graph, order, _states(graph, variant.recomputed))
    at_start = sum(span.bytes for span in spans if span.birth < 0)
    return max(0, _peak_bytes(spans, len(order)) - at_start)


def tangent_storages(graph: JointGraph) -> frozenset[int]:
    """Storages of the gradients that the backward is given."""
    tangents = (node for node in graph.nodes if node.role == "tangent")
    return frozenset(s for node in tangents for s in node.storages)


def moving(graph: JointGraph, variant: Variant, moved: Iterable[int]) -> Variant:
    """The variant with the memory of `moved`, among what it saves, on the host in between."""
    nodes = tuple(sorted(moved))
    assert set(nodes) <= set(variant.saved), "only what is saved can be moved"
    own = {s for s in saved_storages(graph, nodes) if not _at_boundary(graph, s)}
    own_bytes = storage_bytes(graph, own)
    return replace(
        variant,
        moved=nodes,
        moved_bytes=own_bytes,
        held_bytes=max(variant.held_bytes + variant.moved_bytes - own_bytes, 0),
    )


def movable(
    graph: JointGraph, variant: Variant, smallest_bytes: int, staying: Collection[int] = ()
) -> list[tuple[int, ...]]:
    """What the variant saves in storages of at least so many bytes: the nodes of each storage,
    largest first. Nodes in `staying` and those that hold several storages are left out."""
    nodes: dict[int, list[int]] = {}
    for node in set(variant.saved).difference(staying):
        storages = graph.nodes[node].storages
        if len(storages) == 1 and _maker_role(graph, storages[0]) != "parameter":
            nodes.setdefault(storages[0], []).append(node)
    large = [s for s in nodes if graph.storages[s].bytes >= max(smallest_bytes, 1)]
    large.sort(key=lambda s: (-graph.storages[s].bytes, s))
    return [tuple(sorted(nodes[s])) for s in large]


def total_bytes(graph: JointGraph, variant: Variant) -> int:
    """All that a variant holds between forward and backward: its own, its inputs and outputs."""
    shared = {s for s in saved_storages(graph, variant.saved) if _at_boundary(graph, s)}
    return variant.held_bytes + storage_bytes(graph, shared)


def saved_storages(graph: JointGraph, saved: Iterable[int]) -> set[int]:
    """Storages that saved nodes keep alive, those of parameters left out."""
    found = {s for n in saved for s in graph.nodes[n].storages}
    return {s for s in found if _maker_role(graph, s) != "parameter"}


def storage_bytes(graph: JointGraph, storages: Iterable[int]) -> int:
    """The bytes of these storages together."""
    return sum(graph.storages[s].bytes for s in storages)


def _forward_spans(
    graph: JointGraph, kept: frozenset[int], order: Sequence[int]
) -> tuple[Span, ...]:
    """Spans of the forward pass: outputs and what is saved stay."""
    memory = _Memory(graph, ())
    memory.run(order)
    return memory.spans(stay=(*graph.outputs, *kept))


def _backward_spans(
    graph: JointGraph,
    kept: frozenset[int],
    order: Sequence[int],
    freed: frozenset[int] = frozenset(),
) -> tuple[Span, ...]:
    """Spans of the backward pass: what is saved and tangents are there first, gradients stay."""
    tangents = (n for n, value in enumerate(graph.nodes) if value.role == "tangent")
    memory = _Memory(graph, (*kept, *tangents))
    memory.run(order)
    # Others may hold an output too: it does not go when this segment lets go of it.
    return memory.spans(stay=graph.gradients, constant=graph.output_storages - freed)


def _states(graph: JointGraph, again: Iterable[int]) -> dict[int, int]:
    """Bytes of the generator states that nodes are run again with."""
    return {n: graph.nodes[n].state_bytes for n in again if graph.nodes[n].state_bytes}


def _taken_states(
    graph: JointGraph, order: Sequence[int], states: Mapping[int, int]
) -> Iterator[Span]:
    """Spans of the generator states that random nodes take in forward, to be run again with."""
    for step, node in enumerate(order):
        if node in states:
            yield Span(len(graph.storages) + node, states[node], step, -1)


def _restored_states(
    graph: JointGraph, order: Sequence[int], states: Mapping[int, int]
) -> Iterator[Span]:
    """Spans of the same states in backward, let go when used; the state that the generator has
    then is put aside for that moment."""
    for step, node in enumerate(order):
        if node in states:
            yield Span(len(graph.storages) + node, states[node], -1, step + 1)
            yield Span(-1, states[node], step, step + 1)


class _Memory:
    """The blocks of one pass, by number, and which of them each value keeps alive.

    Numbers in lists, not objects: a long pass makes so many that collecting garbage took half of
    the time.
    """

    def __init__(self, graph: JointGraph, there: Iterable[int]) -> None:
        """Begin with the blocks of values that are `there` before the first step."""
        self.graph = graph
        self.storage: list[int] = []
        self.birth: list[int] = []
        self.last: list[int] = []  # the last step that made or read a value in the block
        self.held: dict[int, tuple[int, ...]] = {}
        self.workspaces: list[Span] = []
        found: dict[int, int] = {}
        for node in sorted(there):
            storages = [s for s in graph.nodes[node].storages if _inside(graph, s)]
            for storage in storages:
                if storage not in found:
                    found[storage] = self._add(storage, -1)
            self.held[node] = tuple(found[s] for s in storages)

    def _add(self, storage: int, step: int) -> int:
        self.storage.append(storage)
        self.birth.append(step)
        self.last.append(step)
        return len(self.storage) - 1

    def run(self, order: Sequence[int]) -> None:
        """Run the operators of a pass, one a step."""
        held, last = self.held, self.last
        for step, number in enumerate(order):
            node = self.graph.nodes[number]
            for source in node.inputs:
                for block in held.get(source, ()):
                    last[block] = step
            made: list[int] = []
            for storage in node.storages:
                if self.graph.storages[storage].maker == number:
                    made.append(self._add(storage, step))
                else:
                    made.extend(self._shared(node.inputs, storage))
            held[number] = tuple(made)
            if node.workspace_bytes:
                self.workspaces.append(Span(-1, node.workspace_bytes, step, step + 1))

    def _shared(self, inputs: Iterable[int], storage: int) -> set[int]:
        """The copies of a storage that a view has from what it is a view of."""
        blocks = (block for i in inputs for block in self.held.get(i, ()))
        return {block for block in blocks if self.storage[block] == storage}

    def spans(
        self, stay: Iterable[int], constant: frozenset[int] = frozenset()
    ) -> tuple[Span, ...]:
        """The spans of all blocks in order of birth, then the workspaces.

        Values in `stay` are not let go; storages in `constant` that were there first are no spans.
        """
        staying = {block for node in stay for block in self.held.get(node, ())}
        blocks = (
            Span(
                storage,
                self.graph.storages[storage].bytes,
                birth,
                -1 if block in staying else last + 1,
            )
            for block, (storage, birth, last) in enumerate(
                zip(self.storage, self.birth, self.last, strict=True)
            )
            if birth >= 0 or storage not in constant
        )
        return (*blocks, *self.workspaces)


def _peak_bytes(spans: Sequence[Span], steps: int) -> int:
    """The most bytes alive at any step; 0 for a pass without steps."""
    if not steps:
        return 0
    change = [0] * (steps + 1)
    for span in spans:
        change[max(span.birth, 0)] += span.bytes
        if span.death >= 0:
            change[span.death] -= span.bytes
    return max(accumulate(change[:steps]))


def _at_boundary(graph: JointGraph, storage: int) -> bool:
    """Whether the storage comes in or goes out: others may hold it too."""
    if storage in graph.output_storages:
        return True
    copied = graph.storages[storage].maker in graph.copied
    return _maker_role(graph, storage) == "input" and not copied


def _copied_parameters(graph: JointGraph) -> set[int]:
    """Storages of the parameters that every variant keeps as copies of its own."""
    found = (graph.nodes[n] for n in graph.copied)
    return {s for node in found if node.role == "parameter" for s in node.storages}


def _inside(graph: JointGraph, storage: int) -> bool:
    """Whether the storage is made by the segment or for its backward, not handed to it."""
    return _maker_role(graph, storage) not in INPUT_ROLES


def _maker_role(graph: JointGraph, storage: int) -> str:
    return graph.nodes[graph.storages[storage].maker].role
