"""Fused code may return a gradient in the memory of a tensor that it was given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from memfit.ir.profile import Profile
from memfit.planning.acts import Pick
from memfit.planning.replay import replay
from memfit.planning.simulate import Simulator


def test_another_variant_returns_the_gradient_all_the_same() -> None:
    found = Profile.load(Path(__file__).parent / "vit_b_16_h200.profile.json.gz")
    before = Simulator(found, 0, ("recompute",))
    call = next(c for c in before.graph.calls if c.graph >= 0 and len(before.menus[c.graph]) > 1)
    pick = Pick(call.index, 1)
    numbers = [
        b.id
        for b in found.graph.blocks
        if b.call == call.index and any(h.call == call.index for h in b.holds)
    ]
    largest = max(numbers, key=lambda n: found.graph.blocks[n].bytes)
    block = found.graph.blocks[largest]
    until = call.finish + 2
    holds = tuple(replace(h, release=until) if h.call == call.index else h for h in block.holds)
    blocks = list(found.graph.blocks)
    blocks[largest] = replace(block, holds=holds)
    graph = replace(found.graph, blocks=tuple(blocks))
    after = Simulator(replace(found, graph=graph), 0, ("recompute",))
    assert (call.finish, until, block.bytes) in after.effect(pick).standing
    assert (call.finish, until, block.bytes) not in before.effect(pick).standing
    apart = after.highest([pick]) - before.highest([pick])
    assert apart[call.finish] == apart[until - 1] == block.bytes
    assert not apart[: call.need].any() and not apart[until:].any()
    shown = replay(after, [pick])
    names = {t.name for t in shown.tensors if (t.start, t.end) == (call.finish, until)}
    assert any("gradient" in name for name in names)
