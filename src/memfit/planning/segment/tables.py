"""A profile as two tables: every operator of the step, and every tensor kept for the backward.

Ranks number the operators of the whole step: the forwards of all segment calls as they are called,
their backwards in reverse, the optimizer. A call without a joint graph is one operator per pass,
with the seconds that were measured of it. A name is "segment call/node", here as in plans.

What a row says is seen from its segment call: memory is that of tensors the call makes or keeps
(the whole step is in the timeline), and an input or output that several calls share has a row and
ranks in each that keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np

from memfit.ir.joint_graph import JointGraph, Node, Span, Storage
from memfit.ir.plan import KEEP
from memfit.ir.profile import Profile
from memfit.ir.source import Source
from memfit.ir.step_graph import Call
from memfit.planning.acts import Ints
from memfit.planning.segment.decisions import block_activations, readers_of, recompute_cost
from memfit.planning.segment.passes import variant_of
from memfit.planning.simulate import Simulator

Row = dict[str, str | int | float]

NODE_COLUMNS = (
    "rank",
    "segment",
    "node_name",
    "op",
    "node_type",
    "gtype",
    "median_run_time_s",
    "median_peak_mem_bytes",
    "median_active_mem_bytes",
    "device",
    "source",
)
ACTIVATION_COLUMNS = (
    "activation_name",
    "segment",
    "node_type",
    "creation_rank",
    "last_fw_use_rank",
    "first_bw_use_rank",
    "last_bw_use_rank",
    "median_mem_size_bytes",
    "inactive_time_s",
    "recomp_time_s",
    "recomp_memory_bytes",
    "sources",
    "recomp_time_kept_s",
    "sources_kept",
)


def node_rows(profile: Profile) -> list[Row]:
    """One row per operator in the order of the step; its columns are NODE_COLUMNS.

    Active bytes are those of the call's own tensors alive when the operator runs, the ones it
    keeps for its backward included; the peak adds what the operator needs for itself meanwhile.
    """
    step = _Step(profile)
    return [
        {
            "rank": rank,
            "segment": operator.segment,
            "node_name": operator.name,
            "op": operator.op,
            "node_type": operator.node_type,
            "gtype": operator.gtype,
            "median_run_time_s": operator.seconds,
            "median_peak_mem_bytes": operator.active_bytes + operator.workspace_bytes,
            "median_active_mem_bytes": operator.active_bytes,
            "device": profile.device.type,
            "source": Source.read(operator.source).words,
        }
        for rank, operator in enumerate(step.operators)
    ]


def activation_rows(profile: Profile) -> list[Row]:
    """One row per tensor that a call keeps for its backward; its columns are ACTIVATION_COLUMNS.

    `inactive_time_s` sums the operators strictly between its last use in forward and its first in
    backward. `recomp_time_s` and `sources` are those of making it again when nothing of the segment
    is kept but its inputs, its parameters and what cannot be made twice: the whole chain of its
    ancestors. The `_kept` pair is the same when all else stays that is kept if nobody decides.
    A tensor of a call without a joint graph is made again by the whole call.
    """
    step = _Step(profile)
    return [row for call in profile.graph.calls for row in step.activations(call)]


@dataclass(frozen=True)
class _Operator:
    """What a row of the node table says, but for its rank."""

    segment: str
    name: str
    op: str
    node_type: str
    gtype: str
    seconds: float
    active_bytes: int
    workspace_bytes: int = 0
    source: str = ""


@dataclass(frozen=True)
class _Activation:
    """A tensor kept for the backward, with ranks within its segment's forward and backward."""

    name: str
    bytes: int
    created: int
    last_forward: int
    first_backward: int
    last_backward: int
    recompute_s: float
    recompute_bytes: int
    sources: tuple[str, ...]
    kept_s: float
    kept_sources: tuple[str, ...]


class _Step:
    """The operators of a step by rank, and where each call's begin."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.calls = profile.graph.calls
        self.simulator = Simulator(profile)
        self._deaths = self.simulator.deaths([])
        forward = [self._pass(call, "forward") for call in self.calls]
        backward = [self._pass(call, "backward") for call in self.calls]
        self.forward_start = list(accumulate(map(len, forward), initial=0))
        after = list(accumulate((len(o) for o in reversed(backward)), initial=0))
        self.backward_start = [self.forward_start[-1] + n for n in reversed(after[:-1])]
        self.operators = [
            *(operator for operators in forward for operator in operators),
            *(operator for operators in reversed(backward) for operator in operators),
            self._optimizer(),
        ]
        self._seconds_before = list(accumulate((o.seconds for o in self.operators), initial=0.0))

    # -- operators ----------------------------------------------------------------------------

    def _pass(self, call: Call, gtype: str) -> list[_Operator]:
        if call.graph < 0:
            return [self._whole(call, gtype)]
        return [
            replace(operator, segment=call.name, name=f"{call.name}/{operator.name}")
            for operator in _graph_operators(self.profile.graphs[call.graph])
            if operator.gtype == gtype
        ]

    def _whole(self, call: Call, gtype: str) -> _Operator:
        """A call without a joint graph as one operator."""
        times, simulator = self.profile.call_times[call.index], self.simulator
        if gtype == "forward":
            seconds, mine = times.forward_s, simulator.call == call.index
            active = self._most_bytes(mine, call.enter, call.exit)
        else:
            seconds = times.backward_s
            mine = (simulator.birth >= call.need) & (simulator.birth < call.done)
            mine[simulator.hold_block[simulator.hold_call == call.index]] = True
            active = self._most_bytes(mine, call.need, call.done) if call.need >= 0 else 0
        why = self.profile.uncaptured.get(call.name, "")
        name, node_type = f"{call.name}/{gtype}", "activation" if gtype == "forward" else "gradient"
        return _Operator(call.name, name, call.kind, node_type, gtype, seconds, active, 0, why)

    def _optimizer(self) -> _Operator:
        """The end of the step, with all seconds that no segment call accounts for."""
        graph, profile = self.profile.graph, self.profile
        in_calls_s = sum(t.forward_s + t.backward_s for t in profile.call_times)
        seconds = max(profile.step_s - profile.passes * in_calls_s, 0.0)
        mine = self.simulator.birth >= graph.backward_end
        active = self._most_bytes(mine, graph.backward_end, graph.length)
        source = "optimizer step, loss and code between segments"
        return _Operator(
            "",
            "optimizer",
            "step",
            "optimizer_state",
            "optimizer/other",
            seconds,
            active,
            0,
            source,
        )

    def _most_bytes(self, mine: Ints, start: int, end: int) -> int:
        """The most bytes of these blocks at positions from `start` to before `end`."""
        simulator = self.simulator
        change = np.zeros(max(end - start, 1) + 1, dtype=np.int64)
        blocks = np.flatnonzero(mine & (simulator.birth < end) & (self._deaths > start))
        born = np.clip(simulator.birth[blocks] - start, 0, len(change) - 1)
        gone = np.clip(self._deaths[blocks] - start, 0, len(change) - 1)
        np.add.at(change, born, simulator.bytes[blocks])
        np.add.at(change, gone, -simulator.bytes[blocks])
        return int(np.cumsum(change).max())

    # -- activations --------------------------------------------------------------------------

    def activations(self, call: Call) -> Iterator[Row]:
        """The rows of one call."""
        found = (
            self._blocks(call)
            if call.graph < 0
            else _graph_activations(self.profile.graphs[call.graph])
        )
        forward, backward = self.forward_start[call.index], self.backward_start[call.index]
        for tensor in found:
            first_rank = _shifted(tensor.first_backward, backward)
            # What forward never reads waits from where it is made.
            waits_from = forward + max(tensor.last_forward, tensor.created)
            yield {
                "activation_name": f"{call.name}/{tensor.name}",
                "segment": call.name,
                "node_type": "activation",
                "creation_rank": _shifted(tensor.created, forward),
                "last_fw_use_rank": _shifted(tensor.last_forward, forward),
                "first_bw_use_rank": first_rank,
                "last_bw_use_rank": _shifted(tensor.last_backward, backward),
                "median_mem_size_bytes": tensor.bytes,
                "inactive_time_s": self._seconds_between(waits_from, first_rank),
                "recomp_time_s": tensor.recompute_s,
                "recomp_memory_bytes": tensor.recompute_bytes,
                "sources": _joined(call, tensor.sources),
                "recomp_time_kept_s": tensor.kept_s,
                "sources_kept": _joined(call, tensor.kept_sources),
            }

    def _blocks(self, call: Call) -> Iterator[_Activation]:
        """The saved blocks of a call without a joint graph, which is replayed as a whole."""
        seconds = self.profile.call_times[call.index].recompute_s
        memory = self._most_bytes(self.simulator.call == call.index, call.enter, call.exit)
        used = 0 if call.need >= 0 else -1
        whole = ("inputs",)
        for block in block_activations(self.simulator.graph, call, KEEP, seconds):
            yield _Activation(
                block.name, block.bytes, 0, 0, used, used, seconds, memory, whole, seconds, whole
            )

    def _seconds_between(self, rank: int, later: int) -> float:
        """Seconds of the operators strictly between two ranks; 0 where there is no later one."""
        if later <= rank + 1:
            return 0.0
        return self._seconds_before[later] - self._seconds_before[rank + 1]


def _shifted(rank: int, start: int) -> int:
    """A rank within a segment as one of the step; -1 stays."""
    return -1 if rank < 0 else start + rank


def _joined(call: Call, names: tuple[str, ...]) -> str:
    return " ".join(f"{call.name}/{name}" for name in names)


# -- one joint graph, whichever calls run it ------------------------------------------------------


@lru_cache(maxsize=64)
def _graph_operators(graph: JointGraph) -> tuple[_Operator, ...]:
    """The operators of a segment's forward, then of its backward, as they run unplanned."""
    kept = frozenset(graph.unplanned)
    variant = variant_of(graph, kept)
    activations = {tensor.name for tensor in _graph_activations(graph)}
    found: list[_Operator] = []
    for role, rows, order, spans in (
        ("forward", graph.forward_order(), graph.forward_order(kept), variant.forward),
        ("backward", order_back := graph.backward_order(kept), order_back, variant.backward),
    ):
        alive = dict(zip(order, _alive_bytes(spans, len(order)), strict=True))
        active = 0
        for number in rows:
            node = graph.nodes[number]
            active = alive.get(number, active)  # one that only serves the backward runs there
            if node.role != role:
                continue  # a forward operator run again has its row already
            kind = "activation" if node.name in activations else _node_type(graph, number)
            found.append(
                _Operator(
                    "",
                    node.name,
                    node.op,
                    kind,
                    role,
                    node.seconds,
                    active,
                    node.workspace_bytes,
                    node.source,
                )
            )
    return tuple(found)


def _node_type(graph: JointGraph, number: int) -> str:
    """What an operator makes that is no activation."""
    if number in graph.gradients:
        return "gradient"
    makers = {graph.nodes[graph.storages[s].maker].role for s in graph.nodes[number].storages}
    return "parameter" if makers == {"parameter"} else "other"


def _alive_bytes(spans: Sequence[Span], steps: int) -> list[int]:
    """Bytes of tensors alive at every step of a pass, workspaces of operators left out."""
    change = [0] * (steps + 1)
    for span in spans:
        if span.storage >= 0:
            change[max(span.birth, 0)] += span.bytes
            change[span.death if span.death >= 0 else steps] -= span.bytes
    return list(accumulate(change[:steps]))


@lru_cache(maxsize=64)
def _graph_activations(graph: JointGraph) -> tuple[_Activation, ...]:
    """The tensors that the backward reads, themselves or through views, or that are kept for it."""
    nodes = graph.nodes
    forward_rank = {n: rank for rank, n in enumerate(graph.forward_order())}
    operators = (n for n, node in enumerate(nodes) if node.role == "backward")
    backward_rank = {n: rank for rank, n in enumerate(operators)}
    readers = readers_of(graph)
    once = {n for n, node in enumerate(nodes) if node.role == "forward" and not node.can_recompute}
    unplanned = set(graph.unplanned)
    found = []
    for number, node in enumerate(nodes):
        if node.role not in ("forward", "input") or not node.can_save:
            continue
        in_forward = [forward_rank[r] for r in readers[number] if r in forward_rank]
        in_backward = [backward_rank[r] for r in readers[number] if r in backward_rank]
        if not in_backward and number not in unplanned:
            continue
        seconds, memory, sources = _making_again(graph, number, once - {number})
        kept_s, _, kept_sources = _making_again(graph, number, (once | unplanned) - {number})
        found.append(
            _Activation(
                node.name,
                node.bytes,
                forward_rank.get(number, -1),
                max(in_forward, default=-1),
                min(in_backward, default=-1),
                max(in_backward, default=-1),
                seconds,
                memory,
                sources,
                kept_s,
                kept_sources,
            )
        )
    return tuple(found)


def _making_again(
    graph: JointGraph, number: int, kept: set[int]
) -> tuple[float, int, tuple[str, ...]]:
    """Seconds, most bytes beside the sources, and sources of making one node again."""
    if graph.nodes[number].role == "input":
        return 0.0, 0, ()  # it is made elsewhere
    seconds, sources = recompute_cost(graph, number, kept)
    names = tuple(graph.nodes[s].name for s in sources)
    return seconds, _memory_bytes(graph, number, set(sources)), names


def _memory_bytes(graph: JointGraph, number: int, sources: set[int]) -> int:
    """The most bytes alive while a node is made from its sources, these not counted."""
    again, stack = {number}, [number]
    while stack:
        for source in graph.nodes[stack.pop()].inputs:
            if source not in sources and source not in again:
                again.add(source)
                stack.append(source)
    chosen = sorted(again | sources)
    place = {n: i for i, n in enumerate(chosen)}
    makers: dict[int, int] = {}
    for n in chosen:
        for storage in graph.nodes[n].storages:
            makers.setdefault(storage, place[n])
    numbers = {storage: i for i, storage in enumerate(makers)}

    def moved(n: int) -> Node:
        node = graph.nodes[n]
        return replace(
            node,
            role="forward" if n in again else "input",
            inputs=tuple(place[i] for i in node.inputs) if n in again else (),
            storages=tuple(numbers[s] for s in node.storages),
        )

    alone = JointGraph(
        key=graph.key,
        kind=graph.kind,
        nodes=tuple(moved(n) for n in chosen),
        storages=tuple(Storage(graph.storages[s].bytes, maker) for s, maker in makers.items()),
        outputs=(place[number],),
        gradients=(),
    )
    return variant_of(alone, ()).forward_peak_bytes
