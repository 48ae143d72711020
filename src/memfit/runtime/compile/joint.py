"""The joint graph that torch traced for a segment, as our own JointGraph.

Names, roles, storages and what may be saved or recomputed are decided here, once; the planner and
the executor both work on the result. Nothing here is private to one torch release.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from memfit.ir.joint_graph import JointGraph, Node, Storage
from memfit.runtime.compile.source_lines import source_of

_CUDA_GRAIN = 512
_HASH_CHARACTERS = 12
# Operators of other libraries may hide state or random numbers that their schema does not tell.
_TRUSTED_NAMESPACES = ("aten", "prims", "torchvision")
# Seeds must be drawn once; what is made from them repeats by itself.
_SEED_OPERATORS = ("inductor_seed", "inductor_seeds", "inductor_reserve_rng_state")
# Returns memory of its argument although its schema calls it a new tensor.
_HIDDEN_VIEWS = (torch.ops.aten._unsafe_view.default,)
_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_RUNNING_STATISTICS = (3, 4)  # their places among the arguments of _BATCH_NORM


class NotAGraph(Exception):
    """The traced graph holds something that a JointGraph cannot describe."""


@dataclass(frozen=True)
class Traced:
    """A joint graph of torch with what is known about it."""

    module: fx.GraphModule
    num_outputs: int  # outputs of the forward; the rest are gradients
    static_inputs: frozenset[int]  # positions of parameters and buffers among the primals
    tags_tell_backward: bool  # work of the backward that needs no tangent stays in the backward
    recompute_asked: frozenset[str] = frozenset()  # nodes the user's own checkpoint recomputes
    run_once: frozenset[str] = frozenset()  # nodes torch says must not run again


def structure_of(key: str) -> str:
    """The part of a graph's key that does not depend on shapes."""
    return key.partition("-")[0]


def input_sizes(graph: JointGraph) -> list[str]:
    """Sizes of the activations that enter the graph, whatever their dtypes."""
    inputs = (node.shape for node in graph.nodes if node.role == "input")
    return ["".join(shape.partition("[")[1:]) for shape in inputs]


def dtypes(graph: JointGraph) -> list[str]:
    """The dtype of every node, empty where it is no tensor."""
    return [node.shape.partition("[")[0] for node in graph.nodes]


def names_in(graph: JointGraph, twin: JointGraph) -> dict[str, str] | None:
    """For each node of `graph` its name in `twin`; None when that runs other operators.

    A graph with symbolic sizes numbers its nodes otherwise than one with fixed sizes.
    """
    if _skeleton(graph) != _skeleton(twin):
        return None
    pairs = zip(graph.nodes, twin.nodes, strict=True)
    return {node.name: other.name for node, other in pairs}


def least_saved(graph: JointGraph) -> tuple[str, ...]:
    """Names of what must be saved when everything else is recomputed."""
    must = (n for n in graph.nodes if n.role == "input" or not n.can_recompute)
    return tuple(n.name for n in must if n.can_save)


def is_size(node: fx.Node) -> bool:
    """Whether the node is a number that depends on the shapes of the inputs, not a tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_random(node: fx.Node) -> bool:
    """Whether the operator draws from a random generator."""
    tags = getattr(node.target, "tags", ())
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded not in tags:
        return False
    return _argument(node, "dropout_p") != 0.0  # attention is tagged whether it drops or not


def is_mutating(node: fx.Node) -> bool:
    """Whether the operator writes to one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def is_training_batch_norm(node: fx.Node) -> bool:
    """Whether the node is a batch norm that updates running statistics."""
    return node.op == "call_function" and node.target is _BATCH_NORM and bool(node.args[5])


def output_node(graph: fx.Graph) -> fx.Node:
    """The node that returns the graph's results."""
    return next(iter(graph.find_nodes(op="output")))


def mutated_inputs(traced: Traced) -> set[fx.Node]:
    """Inputs that the segment changes in place: their old values are gone in the backward."""
    graph = traced.module.graph
    found = {n.args[0] for n in graph.nodes if is_mutating(n) and n.args}
    described = {n.meta.get("desc"): n for n in graph.find_nodes(op="placeholder")}
    described.pop(None, None)
    for description in tree_leaves(output_node(graph).meta.get("desc", ())):
        found.add(described.get(getattr(description, "mutated_input", None)))
    return {node for node in found if isinstance(node, fx.Node) and node.op == "placeholder"}


def translate(traced: Traced, kind: str) -> JointGraph:
    """The traced graph as a JointGraph; NotAGraph when it cannot be one."""
    return _Translation(traced).build(kind)


class _Storages:
    """Numbers the memory behind nodes: views share the number of their base."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.maker: list[fx.Node] = []
        self._of: dict[fx.Node, tuple[int | None, ...]] = {}

    def of(self, node: fx.Node) -> tuple[int, ...]:
        """Storages of the node's tensors, each once."""
        return tuple(dict.fromkeys(s for s in self._of[node] if s is not None))

    def is_view(self, node: fx.Node) -> bool:
        """Whether the node shows memory that another operator made."""
        source = node.args[0] if node.target is operator.getitem else node
        return any(self.maker[s] not in (node, source) for s in self.of(node))

    def add(self, node: fx.Node) -> None:
        """Number the storages of a node whose inputs have been numbered."""
        values = _values(node)
        if node.target is operator.getitem:
            source, position = node.args
            assert isinstance(source, fx.Node) and isinstance(position, int)
            inner = self._of[source]
            nested = isinstance(node.meta.get("val"), (tuple, list))
            if not nested and position < len(inner) == len(_values(source)):
                self._of[node] = (inner[position],)
                return
        fresh: dict[int, int] = {}
        sources = self._aliased(node, len(values))
        self._of[node] = tuple(
            None
            if not isinstance(value, torch.Tensor)
            else self._number(node, value, source, fresh)
            for value, source in zip(values, sources, strict=True)
        )

    def _number(
        self, node: fx.Node, value: torch.Tensor, source: fx.Node | None, fresh: dict[int, int]
    ) -> int:
        if source is not None:
            return self.of(source)[0]
        identity = value.untyped_storage()._cdata
        if identity not in fresh:
            fresh[identity] = len(self.sizes)
            self.sizes.append(_round(_as_int(value.untyped_storage().nbytes()), value.device))
            self.maker.append(node)
        return fresh[identity]

    def _aliased(self, node: fx.Node, count: int) -> list[fx.Node | None]:
        """For each result, the input whose memory it shows, if any."""
        declared = _declared_alias(node)
        if declared is not None and self._of.get(declared):
            return [declared] * count
        return [self._same_memory(node, value) for value in _values(node)]

    def _same_memory(self, node: fx.Node, value: Any) -> fx.Node | None:
        if not isinstance(value, torch.Tensor):
            return None
        identity = value.untyped_storage()._cdata
        for source in node.all_input_nodes:
            shown = source.meta.get("val")
            if isinstance(shown, torch.Tensor) and shown.untyped_storage()._cdata == identity:
                return source
        return None


class _Translation:
    """Reads a traced graph. Sizes that are symbols are left out: they take no memory."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.values = [n for n in traced.module.graph.nodes if n.op != "output"]
        self.nodes = [n for n in self.values if not is_size(n)]
        self.mutated = mutated_inputs(traced)
        self.storages = _Storages()
        self.role = self._roles()

    def build(self, kind: str) -> JointGraph:
        for node in sorted(self.values, key=lambda n: n.op == "placeholder"):  # causes first
            _check(node)
        for node in self.nodes:
            self.storages.add(node)
        groups = (("parameter", "input"), ("forward",), ("tangent",), ("backward",))
        ordered = [n for group in groups for n in self.nodes if self.role[n] in group]
        number = {node: i for i, node in enumerate(ordered)}
        results = list(tree_leaves(output_node(self.traced.module.graph).args[0]))
        split = self.traced.num_outputs
        graph = JointGraph(
            key="",
            kind=kind,
            nodes=tuple(self._node(n, number) for n in ordered),
            storages=tuple(
                Storage(size, number[maker])
                for size, maker in zip(self.storages.sizes, self.storages.maker, strict=True)
            ),
            outputs=_numbers(results[:split], number),
            gradients=_numbers(results[split:], number),
        )
        return replace(graph, key=_key(graph))

    def _roles(self) -> dict[fx.Node, str]:
        roles: dict[fx.Node, str] = {}
        primals = 0
        for node in self.values:
            if node.op == "placeholder" and "tangents" in str(node.target):
                roles[node] = "tangent"
            elif node.op == "placeholder":
                roles[node] = "parameter" if primals in self.traced.static_inputs else "input"
                primals += 1
            elif node.op == "get_attr":
                roles[node] = "parameter"
            elif self._runs_in_backward(node, roles):
                roles[node] = "backward"
            else:
                roles[node] = "forward"
        return roles

    def _runs_in_backward(self, node: fx.Node, roles: dict[fx.Node, str]) -> bool:
        if any(roles[i] in ("tangent", "backward") for i in node.all_input_nodes):
            return True
        tag = str(node.meta.get("partitioner_tag"))
        return tag == "must_be_in_backward" or (
            self.traced.tags_tell_backward and tag == "is_backward"
        )

    def _node(self, node: fx.Node, number: dict[fx.Node, int]) -> Node:
        value, role, storages = node.meta.get("val"), self.role[node], self.storages.of(node)
        tensor = isinstance(value, torch.Tensor)
        forward = role == "forward"
        random = is_random(node)
        recomputable = (
            forward
            and _repeatable(node)
            and node.name not in self.traced.run_once
            and not self._reads_mutated(node)
        )
        return Node(
            name=node.name,
            op=_operator_name(node),
            role=role,
            inputs=tuple(number[i] for i in node.all_input_nodes if not is_size(i)),
            storages=storages,
            bytes=sum(_tensor_bytes(v) for v in _values(node)),
            shape=_shape(value),
            can_save=(
                tensor
                and node not in self.mutated
                and (role == "input" or (forward and not self.storages.is_view(node)))
            ),
            can_recompute=recomputable,
            random=random,
            state_bytes=_state_bytes(node) if random and recomputable else 0,
            source=source_of(node).text,
        )

    def _reads_mutated(self, node: fx.Node) -> bool:
        read = set(node.all_input_nodes)
        if is_training_batch_norm(node):  # recomputed without them: see partition
            read -= {node.args[i] for i in _RUNNING_STATISTICS}
        return bool(read & self.mutated)


def _check(node: fx.Node) -> None:
    """Refuse values whose size depends on data, or that have no plain storage."""
    if is_size(node) and free_unbacked_symbols(node.meta["val"]):
        raise NotAGraph(f"{node.name} depends on data ({source_of(node).words})")
    for value in _values(node):
        if not isinstance(value, torch.Tensor):
            continue
        if value.layout is not torch.strided or not torch._C._has_storage(value):
            raise NotAGraph(f"{node.name} is a {value.layout} tensor ({source_of(node).words})")
        if free_unbacked_symbols(value):
            raise NotAGraph(
                f"{node.name} has a size that depends on data ({source_of(node).words})"
            )


def _argument(node: fx.Node, name: str) -> Any:
    """The value an operator is called with, or its default; None when it has no such argument."""
    schema = getattr(node.target, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == name:
            given = node.args[position] if position < len(node.args) else argument.default_value
            return node.kwargs.get(name, given)
    return None


def _declared_alias(node: fx.Node) -> fx.Node | None:
    """The argument that a view operator's schema says it shows."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not node.args:
        return None
    first = node.args[0]
    viewing = any(r.alias_info is not None for r in schema.returns)
    if isinstance(first, fx.Node) and (viewing or node.target in _HIDDEN_VIEWS):
        return first
    return None


def _repeatable(node: fx.Node) -> bool:
    """Whether running the operator again gives the same value and changes nothing else."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _repeatable(node.args[0])
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace in _TRUSTED_NAMESPACES
        and not target._schema.is_mutable
        and target._schema.name.partition("::")[2] not in _SEED_OPERATORS
    )


def _values(node: fx.Node) -> Sequence[Any]:
    value = node.meta.get("val")
    return tree_leaves(value) if isinstance(value, (tuple, list)) else (value,)


def _round(size: int, device: torch.device) -> int:
    """Bytes as the allocator of the device counts them."""
    return -(-size // _CUDA_GRAIN) * _CUDA_GRAIN if device.type == "cuda" else size


def _tensor_bytes(value: Any) -> int:
    return _as_int(value.numel()) * value.element_size() if isinstance(value, torch.Tensor) else 0


def _as_int(size: int | torch.SymInt) -> int:
    """The size, for a symbol that of the inputs it was traced with; int() would fix it to that."""
    return size if isinstance(size, int) else int(size.node.hint or 0)


def _state_bytes(node: fx.Node) -> int:
    """What a generator's state takes on the device; that of a GPU is kept in host memory."""
    devices = {v.device.type for v in _values(node) if isinstance(v, torch.Tensor)}
    return torch.get_rng_state().nbytes if devices <= {"cpu"} else 0


def _shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _operator_name(node: fx.Node) -> str:
    if node.op != "call_function":
        return node.op
    return str(node.target) if hasattr(node.target, "_schema") else node.target.__name__  # type: ignore[union-attr]


def _numbers(results: Iterable[Any], number: dict[fx.Node, int]) -> tuple[int, ...]:
    return tuple(number[r] for r in results if isinstance(r, fx.Node) and not is_size(r))


def _key(graph: JointGraph) -> str:
    structure = [(n.name, n.op, n.role, n.inputs) for n in graph.nodes]
    sizes = [n.shape for n in graph.nodes] + [str(s.bytes) for s in graph.storages]
    return f"{_digest((structure, graph.outputs, graph.gradients))}-{_digest(sizes)}"


def _skeleton(graph: JointGraph) -> object:
    return [(n.op, n.role, n.inputs) for n in graph.nodes], graph.outputs, graph.gradients


def _digest(data: object) -> str:
    return hashlib.sha256(repr(data).encode()).hexdigest()[:_HASH_CHARACTERS]


def read_by_backward(graph: JointGraph, again: Collection[str] = ()) -> tuple[str, ...]:
    """Names of what the backward reads, each view replaced by the tensor it shows.

    Nodes in `again` are recomputed where they can be, so that what they read is saved.
    """
    found: set[int] = set()
    stack = list(graph.needed)
    while stack:
        i = stack.pop()
        node = graph.nodes[i]
        if node.role == "parameter":
            continue
        repeated = node.name in again and node.can_recompute
        if node.role == "input" or (node.can_save and not repeated):
            found.add(i)
        else:
            stack.extend(node.inputs)
    return tuple(graph.nodes[i].name for i in sorted(found))
