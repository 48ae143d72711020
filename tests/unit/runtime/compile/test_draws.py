"""Seeds of fused code are drawn after the random operators that stand before them."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._inductor import inductor_prims
from torch._prims.rng_prims import run_and_save_rng_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from memfit.runtime.compile.draws import draw_in_order

CPU = torch.device("cpu")


def random_graph(*, order_first: bool) -> fx.GraphModule:
    """Draws an order (by a kernel of its own) and numbers (in fused code), in this order or not."""
    graph = fx.Graph()
    x = graph.placeholder("x")

    def order() -> fx.Node:
        return graph.call_function(torch.ops.aten.randperm.default, (6,), {"device": CPU})

    first = order() if order_first else None
    seeds = graph.call_function(inductor_prims.seeds, (1, CPU))
    first = first or order()
    seed = graph.call_function(inductor_prims.lookup_seed, (seeds, 0))
    numbers = graph.call_function(inductor_prims.random, ([6], seed, "rand"))
    total = graph.call_function(torch.ops.aten.add.Tensor, (x, numbers))
    graph.output((first, total))
    module = fx.GraphModule({}, graph)
    with FakeTensorMode() as mode:
        FakeTensorProp(module, mode).propagate(torch.zeros(6))
    return module


def test_seeds_wait_for_draws_before_them() -> None:
    module = random_graph(order_first=True)
    draw_in_order(module)
    module.graph.lint()
    (seeds,) = [n for n in module.graph.nodes if "seeds" in str(n.target)]
    assert seeds.target is torch.ops.memfit.seeds_after.default
    (waits_for,) = seeds.args[0]
    assert waits_for.target is torch.ops.aten.randperm.default
    torch.manual_seed(0)
    order, numbers = module(torch.zeros(6))
    torch.manual_seed(0)
    assert torch.equal(order, torch.randperm(6))
    seed = torch.randint(2**63 - 1, (1,))[0]
    assert torch.equal(numbers, inductor_prims.random([6], seed, "rand"))


def test_fused_code_runs_with_them() -> None:
    module = random_graph(order_first=True)
    draw_in_order(module)
    compiled = torch._inductor.compile(module, [torch.zeros(6)])
    torch.manual_seed(0)
    order, _ = compiled(torch.zeros(6))
    torch.testing.assert_close(order, torch.randperm(6, generator=_seeded()))


def test_seeds_that_come_first_stay_as_they_are() -> None:
    module = random_graph(order_first=False)
    before = [n.target for n in module.graph.nodes]
    draw_in_order(module)
    assert [n.target for n in module.graph.nodes] == before


def test_seeds_wait_for_what_a_replayed_operator_drew_not_for_its_state() -> None:
    """The random state is a real tensor even while tracing, where none may come in."""
    module = random_graph(order_first=True)
    graph = module.graph
    drawn = next(n for n in graph.nodes if n.target is torch.ops.aten.randperm.default)
    with graph.inserting_before(drawn):
        both = graph.call_function(run_and_save_rng_state, (drawn.target, 6), {"device": CPU})
        state = graph.call_function(operator.getitem, (both, 0))
        again = graph.call_function(operator.getitem, (both, 1))
    state.meta["val"] = torch.get_rng_state()
    again.meta["val"] = drawn.meta["val"]
    drawn.replace_all_uses_with(again)
    graph.erase_node(drawn)
    draw_in_order(module)
    (seeds,) = [n for n in graph.nodes if "seeds" in str(n.target)]
    assert seeds.args[0] == [again]


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
