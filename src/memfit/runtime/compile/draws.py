"""Random numbers in fused code: drawn in the same order, whatever a plan keeps.

Inductor draws the seeds of its own random operators at one point of a graph, and attention draws
from the same generator at another; which comes first it decides anew for every graph. Here the
seeds are made to depend on the draws before them. Limits: draws that come after the seeds and do
not depend on them are not held back.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from memfit.runtime.compile.joint import is_random

_SEEDS = "prims::inductor_seeds"
_MOST = torch.iinfo(torch.int64).max
_SAVES_STATE = torch._prims.rng_prims.run_and_save_rng_state


# Defined without torch.library.custom_op, whose wrapper takes longer on the host than the draw.
_LIBRARY = torch.library.Library("memfit", "FRAGMENT")
_LIBRARY.define(
    "seeds_after(Tensor[] drawn, int count, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.needs_fixed_stride_order),
)


def _seeds_after(drawn: Sequence[torch.Tensor], count: int, device: torch.device) -> torch.Tensor:
    """Seeds for random operators, drawn when the tensors in `drawn` are there."""
    return torch.randint(_MOST, (count,), device=device)  # as inductor_seeds does


def _seeds_meta(drawn: Sequence[torch.Tensor], count: int, device: torch.device) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int64, device=device)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("seeds_after", _seeds_after, _key)
torch.library.register_fake("memfit::seeds_after", _seeds_meta, lib=_LIBRARY)


def draw_in_order(module: fx.GraphModule) -> None:
    """Have the seeds of a graph drawn after the random operators that stand before them."""
    drawn: list[fx.Node] = []
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.name == _SEEDS:
            if drawn:
                node.target = torch.ops.memfit.seeds_after.default
                node.args = (list(drawn), *node.args)
        elif is_random(node) or node.target is _SAVES_STATE:
            result = _some_tensor(node)
            drawn += [] if result is None else [result]
    module.recompile()


def _some_tensor(node: fx.Node) -> fx.Node | None:
    """A tensor that the operator made, with the fewest dimensions: to ask a symbolic size would
    put a guard on it."""
    found, made = [], [node]
    while made:
        value = made.pop()
        if isinstance(value.meta.get("val"), torch.Tensor):
            found.append(value)
        else:
            made += [user for user in value.users if user.target is operator.getitem]
            if value.target is _SAVES_STATE:  # not the state, which has no value while tracing
                made = [user for user in made if user.args[1] != 0]
    return min(found, key=lambda n: n.meta["val"].dim(), default=None)
