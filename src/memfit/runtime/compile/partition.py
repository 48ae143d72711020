"""Cut a traced joint graph into a forward and a backward that hand over a chosen set of tensors.

This is the only module that touches torch's partitioner. What it builds is checked: the forward
returns exactly the chosen tensors, the backward runs exactly its own operators and those that
must be recomputed, in the order of JointGraph.backward_order.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.compile_utils import fx_graph_cse, raise_getitems
from torch.utils.checkpoint import CheckpointPolicy

from memfit.ir.joint_graph import JointGraph
from memfit.runtime.compile.draws import draw_in_order
from memfit.runtime.compile.joint import (
    Traced,
    is_random,
    is_size,
    is_training_batch_norm,
    output_node,
)

_BATCH_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_BATCH_NORM_WITHOUT_STATISTICS = torch.ops.aten._native_batch_norm_legit.no_stats
_EXTRACT_OPTIONS = inspect.signature(partitioners._extract_fwd_bwd_modules).parameters

_Halves = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True)
class Pair:
    """A joint graph cut in two. `results` names what the forward returns, "" a random state.

    `saved` are the nodes handed to the backward, parameters left out; `again` those it makes again.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_outputs: int
    results: tuple[str, ...]
    saved: tuple[str, ...]
    again: frozenset[str] = frozenset()


def prepare(
    module: fx.GraphModule,
    num_outputs: int,
    static_inputs: Collection[int] | None,
    *,
    tags_tell_backward: bool,
) -> Traced:
    """Clean a joint graph of dead and doubled operators; the names it has then are final."""
    module.graph.eliminate_dead_code()
    if functorch_config.cse:
        module.graph = fx_graph_cse(module.graph)
    module = raise_getitems(module)
    asked = {n.name for n in module.graph.nodes if partitioners.must_recompute(n)}
    before = _must_save(module)
    for helper in ("force_save_collectives", "force_save_effectful_ops"):
        getattr(partitioners, helper, lambda _: None)(module)
    partitioners.force_save_bw_mutation_src(module)
    for node in module.graph.find_nodes(op="call_function", target=_BATCH_NORM_BACKWARD):
        _forget_running_statistics(node)
    module.recompile()
    return Traced(
        module=module,
        num_outputs=num_outputs,
        static_inputs=frozenset(static_inputs or ()),
        tags_tell_backward=tags_tell_backward,
        recompute_asked=frozenset(asked),
        run_once=frozenset(_must_save(module) - before),
    )


def split(traced: Traced, graph: JointGraph, saved: Sequence[str]) -> Pair:
    """Forward and backward that hand over `saved` and the parameters, and nothing else.

    Saved nodes that the backward does not need after all are not handed over.
    """
    numbers = frozenset(graph.index[name] for name in saved)
    order = [graph.nodes[i].name for i in graph.backward_order(numbers)]
    again = {graph.nodes[i].name for i in graph.recomputed(numbers)}
    once = [name for name in again if not graph.nodes[graph.index[name]].can_recompute]
    assert not once, f"{once[0]} must not run again, and is not saved"
    handed = _handed_over(graph, order)
    forward, backward, sizes = _extract(traced, handed, _sizes_read(traced, graph, order))
    _erase_backward(forward, graph)
    backward = _in_order(backward, order)
    _check(traced.num_outputs, forward, backward, handed, order)
    names = _result_names(forward)
    forward, backward = _replay_random(traced, forward, backward, again, sizes)
    states = [""] * (len(_result_names(forward)) - len(names))
    last = len(names) - sizes  # torch wants sizes to come after the random states
    names = [*names[:last], *states, *names[last:]]
    dropped = _recompute_batch_norms(traced.num_outputs, forward, backward)
    for half in (forward, backward):
        half.graph.lint()
        half.recompile()
    left = [n for i, n in enumerate(names) if i < traced.num_outputs or n not in dropped]
    return replace(_pair(traced, graph, forward, backward, left), again=frozenset(again))


def default_min_cut(traced: Traced, graph: JointGraph, inputs: Any) -> Pair:
    """What torch itself chooses to save for inductor."""
    forward, backward = partitioners.min_cut_rematerialization_partition(
        traced.module,
        inputs,
        compiler="inductor",
        num_fwd_outputs=traced.num_outputs,
        static_lifetime_input_indices=sorted(traced.static_inputs),
    )
    return _pair(traced, graph, forward, backward, _result_names(forward))


def _pair(
    traced: Traced,
    graph: JointGraph,
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    names: Sequence[str],
) -> Pair:
    draw_in_order(forward)
    known = (graph.index.get(name) for name in names[traced.num_outputs :])
    kept = [graph.nodes[i] for i in known if i is not None]
    return Pair(
        forward=forward,
        backward=backward,
        num_outputs=traced.num_outputs,
        results=tuple(names),
        saved=tuple(node.name for node in kept if node.role != "parameter"),
    )


def _must_save(module: fx.GraphModule) -> set[str]:
    policy = CheckpointPolicy.MUST_SAVE
    return {n.name for n in module.graph.nodes if n.meta.get("recompute") is policy}


def _results(forward: fx.GraphModule) -> tuple[Any, ...]:
    values: Any = output_node(forward.graph).args[0]
    return tuple(values)


def _result_names(forward: fx.GraphModule) -> list[str]:
    return [v.name if isinstance(v, fx.Node) else "" for v in _results(forward)]


def _handed_over(graph: JointGraph, order: Sequence[str]) -> list[str]:
    """Nodes the backward reads and does not make: saved ones and parameters."""
    made = {graph.index[name] for name in order}
    read = {i for n in made for i in graph.nodes[n].inputs} | set(graph.gradients)
    nodes = [graph.nodes[i] for i in sorted(read - made)]
    return [n.name for n in nodes if n.role != "tangent" and n.op != "get_attr"]


def _sizes_read(traced: Traced, graph: JointGraph, order: Sequence[str]) -> list[fx.Node]:
    """Sizes that the backward reads and the forward knows; it makes those of tangents itself."""
    late = {n.name for n in graph.nodes if n.role in ("tangent", "backward")}
    runs = {*order, "output"}
    found: dict[fx.Node, None] = {}
    for node in traced.module.graph.nodes:
        if is_size(node) and any(i.name in late for i in node.all_input_nodes):
            late.add(node.name)
        if node.name in runs or (is_size(node) and node.name in late):
            found.update(dict.fromkeys(i for i in node.all_input_nodes if is_size(i)))
    return [node for node in found if node.name not in late]


def _extract(
    traced: Traced, handed: Sequence[str], sizes: list[fx.Node]
) -> tuple[fx.GraphModule, fx.GraphModule, int]:
    """The two halves, and how many sizes the first hands to the second."""
    nodes = {n.name: n for n in traced.module.graph.nodes}
    options: dict[str, Any] = {
        "saved_sym_nodes": sizes,  # torch adds to them what the shapes are made of
        "num_fwd_outputs": traced.num_outputs,
        "static_lifetime_input_nodes": None,
    }
    forward, backward = partitioners._extract_fwd_bwd_modules(
        traced.module,
        [nodes[name] for name in handed],
        **{name: value for name, value in options.items() if name in _EXTRACT_OPTIONS},
    )
    return forward, backward, len(sizes)


def _erase_backward(forward: fx.GraphModule, graph: JointGraph) -> None:
    """Take backward operators out that torch kept because it never drops random ones."""
    roles = {node.name: node.role for node in graph.nodes}
    for node in reversed(list(forward.graph.nodes)):
        if roles.get(node.name) == "backward" and not node.users:
            forward.graph.erase_node(node)


def _in_order(module: fx.GraphModule, order: Sequence[str]) -> fx.GraphModule:
    """The backward with its operators in this order, others dropped."""
    old = {n.name: n for n in module.graph.nodes}
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> None:
        for size in node.all_input_nodes:
            if is_size(size) and size not in made:
                copy(size)
        made[node] = graph.node_copy(node, lambda n: made[n])

    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            copy(node)
    for name in order:
        copy(old[name])
    copy(output_node(module.graph))
    return fx.GraphModule(module, graph)


def _check(
    num_outputs: int,
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    handed: Sequence[str],
    order: Sequence[str],
) -> None:
    """Make sure that what will run is what was decided."""
    values = [v for v in _results(forward)[num_outputs:] if not is_size(v)]
    returned = [v.name for v in values]
    assert sorted(returned) == sorted(handed), f"saves {returned} in the place of {handed}"
    runs = [n.name for n in backward.graph.nodes if n.op == "call_function" and not is_size(n)]
    assert runs == list(order), f"runs {runs} in the place of {order}"


def _replay_random(
    traced: Traced, forward: fx.GraphModule, backward: fx.GraphModule, again: set[str], sizes: int
) -> _Halves:
    """Let random operators that run twice draw the same numbers both times."""
    twice = [n for n in traced.module.graph.nodes if is_random(n) and n.name in again]
    if not twice:
        return forward, backward
    for node in twice:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return partitioners.functionalize_rng_ops(traced.module, forward, backward, sizes)


def _forget_running_statistics(node: fx.Node) -> None:
    """In training the gradient of a batch norm does not depend on its running statistics."""
    arguments = list(node.args)
    if arguments[7]:
        arguments[3] = arguments[4] = None
        node.args = tuple(arguments)


def _recompute_batch_norms(
    num_outputs: int, forward: fx.GraphModule, backward: fx.GraphModule
) -> set[str]:
    """Recompute batch norms without their running statistics; what is then no longer saved.

    With them the statistics would be updated twice, and autograd refuses to hand over buffers
    that the forward changed.
    """
    norms = [n for n in backward.graph.nodes if is_training_batch_norm(n)]
    for node in norms:
        x, weight, bias, _, _, _, momentum, eps = node.args
        with backward.graph.inserting_before(node):
            plain = backward.graph.call_function(
                _BATCH_NORM_WITHOUT_STATISTICS, (x, weight, bias, True, momentum, eps)
            )
        plain.meta = dict(node.meta)
        node.replace_all_uses_with(plain)
        backward.graph.erase_node(node)
    return _drop_unread(num_outputs, forward, backward) if norms else set()


def _drop_unread(num_outputs: int, forward: fx.GraphModule, backward: fx.GraphModule) -> set[str]:
    """Stop handing over what the backward no longer reads; its names."""
    inputs = backward.graph.find_nodes(op="placeholder")
    unread = [n for n in inputs if not n.users and "tangents" not in str(n.target)]
    names = {n.name for n in unread}
    for node in unread:
        backward.graph.erase_node(node)
    values, result = _results(forward), output_node(forward.graph)
    old = _result_names(forward)
    keep = [i for i in range(len(values)) if i < num_outputs or old[i] not in names]
    result.args = (tuple(values[i] for i in keep),)
    for field in ("desc", "output_stack_traces"):
        if len(result.meta.get(field, ())) == len(values):
            result.meta[field] = [result.meta[field][i] for i in keep]
    return names
