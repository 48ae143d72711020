"""What each act does to the memory of a step: held, moved, made anew, and the moments inside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memfit.ir.joint_graph import Variant
from memfit.ir.step_graph import Call
from memfit.planning.acts import AT_ONCE, Act, Away, Effect, Ints, Pick, Run, Send
from memfit.planning.segment.passes import tangent_storages

if TYPE_CHECKING:
    from memfit.planning.simulate import Simulator


def effect_of(sim: Simulator, act: Act) -> Effect:
    """What an act does to the memory of the step."""
    if isinstance(act, Pick):
        return _pick(sim, act, sim.graph.calls[act.call], sim.variant(act))
    if isinstance(act, Send):
        return _send(sim, act, sim.graph.calls[act.call])
    return _replay(sim, act)


def _away(
    sim: Simulator,
    act: Pick | Send,
    own_bytes: int,
    tensors: int,
    blocks: Ints,
    releases: Ints,
) -> Away:
    """What an act moves, with the positions its points stand for."""
    graph, calls = sim.graph, len(sim.graph.calls)
    release = act.call + 1 if act.release == AT_ONCE else act.release
    prefetch = act.call if act.prefetch == AT_ONCE else act.prefetch
    return Away(
        call=act.call,
        release=release,
        prefetch=prefetch,
        own_bytes=own_bytes,
        tensors=tensors,
        moments=1 if isinstance(act, Pick) else max(tensors, 1),
        blocks=blocks,
        leaves=graph.calls[release].enter if release < calls else graph.model_end,
        returns=graph.calls[prefetch].need if prefetch < calls else graph.model_end,
        releases=releases,
    )


def own_blocks(sim: Simulator, call: Call) -> Ints:
    """Blocks that a captured call's graphs make and free within its forward or backward."""
    within = (sim.call == call.index) & (sim.death <= call.exit)
    backward = (sim.birth > call.need) & (sim.birth < call.finish)
    return np.flatnonzero(within | (backward & (sim.death <= call.finish)))


def _pick(sim: Simulator, act: Pick, call: Call, variant: Variant) -> Effect:
    """What a variant holds, and the moments inside its two graphs.

    Everything outside stands still while a graph runs, so its own peak adds to that.
    """
    moved = _outside(sim, call, variant.moved)
    held = np.setdiff1d(_outside(sim, call, variant.saved), moved)
    standing = [(call.exit, call.need + 1, variant.held_bytes)]
    away = None
    if variant.moved:
        tensors = len({sim.profile.graphs[call.graph].nodes[n].storages for n in variant.moved})
        releases = np.full(len(moved), call.need + 1, dtype=np.int64)
        away = _away(sim, act, variant.moved_bytes, tensors, moved, releases)
        standing.append((call.exit, away.leaves, variant.moved_bytes))
        standing.append((away.returns, call.need + 1, variant.moved_bytes))
    standing += _gradients(sim, call)
    none = np.array([], dtype=np.int64)
    return Effect(
        need=call.need,
        held=held,
        held_until=np.full(len(held), call.need + 1, dtype=np.int64),
        blocks=none,
        releases=none,
        survivor_bytes=0,
        standing=tuple(standing),
        away=away,
        inside=(
            (call.enter, variant.forward_peak_bytes, f"forward {call.name}"),
            (call.need, _backward_peak(sim, act, call, variant), f"backward {call.name}"),
        ),
        absent=own_blocks(sim, call),
    )


def _gradients(sim: Simulator, call: Call) -> list[tuple[int, int, int]]:
    """The gradients that a call's backward returned in the memory of what it was given: by another
    variant they are there all the same, from its end until they were let go."""
    if call.finish < 0:  # nobody saw its backward end
        return []
    mine = (sim.hold_call == call.index) & (sim.hold_release > call.finish)
    blocks, releases = sim.hold_block[mine], sim.hold_release[mine]
    sizes = sim.bytes[blocks]
    return [(call.finish, int(r), int(n)) for r, n in zip(releases, sizes, strict=True)]


def _backward_peak(sim: Simulator, act: Pick, call: Call, variant: Variant) -> int:
    """The peak inside a captured backward.

    In a step with branches one gradient may be given to several calls: where it outlives this
    one's backward, it does not make room in it. An output that is saved does, if all others that
    may hold it are done by then.
    """
    graph = sim.profile.graphs[call.graph]
    freed = {
        storage
        for node in set(graph.outputs).intersection(graph.held_outside(variant.saved))
        if _held_last_by(sim, call, call.held.get(graph.nodes[node].name, -1))
        for storage in graph.nodes[node].storages
    }
    sizes = [graph.storages[s].bytes for s in tangent_storages(graph)]
    given = (sim.birth > sim.graph.forward_end) & (sim.birth <= call.need)
    stays = given & (sim.death > call.finish) & np.isin(sim.bytes, sizes)
    return sim.backward_peak_bytes(call.graph, act.variant, bool(stays.any()), frozenset(freed))


def _held_last_by(sim: Simulator, call: Call, block: int) -> bool:
    """Whether nobody but this call may hold a block of the step once its backward begins."""
    if block < 0 or sim.death[block] > call.need:
        return False
    others = (
        other
        for other in sim.graph.calls
        if other.index != call.index and (block in other.args or block in other.held.values())
    )
    holding = sim.hold_call[sim.hold_block == block]
    rest = [sim.graph.calls[c] for c in holding.tolist() if c != call.index]
    return all(max(other.done, other.finish) <= call.need for other in (*others, *rest))


def _outside(sim: Simulator, call: Call, nodes: tuple[int, ...]) -> Ints:
    """The step's blocks among a call's inputs and outputs that these nodes hold."""
    graph = sim.profile.graphs[call.graph]
    names = (graph.nodes[n].name for n in graph.held_outside(nodes))
    found = {call.held[name] for name in names if call.held.get(name, -1) >= 0}
    return np.array(sorted(found), dtype=np.int64)


def _send(sim: Simulator, act: Send, call: Call) -> Effect:
    """What moving all large blocks that a call keeps does; the others stay."""
    mine = sim.hold_call == call.index
    blocks, releases = sim.hold_block[mine], sim.hold_release[mine]
    large = sim.bytes[blocks] >= sim.smallest_move_bytes
    none = np.array([], dtype=np.int64)
    away = None
    if large.any():
        away = _away(sim, act, 0, int(large.sum()), blocks[large], releases[large])
    return Effect(
        need=call.need,
        held=blocks[~large],
        held_until=releases[~large],
        blocks=none,
        releases=none,
        survivor_bytes=0,
        standing=(),
        inside=(),
        absent=none,
        away=away,
    )


def _replay(sim: Simulator, run: Run) -> Effect:
    """What recomputing a run does; nothing when its backward needs nothing from it."""
    first, last = run
    calls = sim.graph.calls[first : last + 1]
    none = np.array([], dtype=np.int64)
    needs = [c.need for c in calls if c.need >= 0]
    if not needs:
        return Effect(0, none, none, none, none, 0, (), (), none)
    arguments = np.array(sorted(sim.graph.held_arguments(first, last)), dtype=np.int64)
    stop = max(c.stop for c in calls)
    mine = (sim.call >= first) & (sim.call <= last) & (sim.birth <= stop)
    holds = (sim.hold_call >= first) & (sim.hold_call <= last)
    # Saved inside the run: made by it, or gone by then and neither made nor passed in (a cast
    # that autocast cached for an earlier segment), which the replay has to make again.
    blocks = sim.hold_block[holds]
    inside = mine[blocks] | ~(np.isin(blocks, arguments) | (sim.death[blocks] > min(needs)))
    release = np.full(len(sim.bytes), -1, dtype=np.int64)
    np.maximum.at(release, blocks[inside], sim.replay_release[holds][inside])
    survivors = np.flatnonzero(release > min(needs))
    survivor_bytes = int(sim.bytes[survivors].sum())
    made_again = survivors[~mine[survivors]]

    start = calls[0].enter
    change = np.zeros(stop - start + 2, dtype=np.int64)
    change[0] += sim.bytes[made_again].sum()
    own = np.flatnonzero(mine)
    np.add.at(change, sim.birth[own] - start, sim.bytes[own])
    passing = own[(release[own] < 0) & (sim.death[own] <= stop)]
    np.add.at(change, sim.death[passing] - start, -sim.bytes[passing])
    need, done = min(needs), max(c.done for c in calls)
    state_bytes = sum(c.state_bytes for c in calls)
    name = calls[0].name if first == last else f"{calls[0].name}..{calls[-1].name}"
    return Effect(
        need=need,
        held=arguments,
        held_until=np.full(len(arguments), done, dtype=np.int64),
        blocks=survivors,
        releases=release[survivors],
        survivor_bytes=survivor_bytes,
        standing=((start, done, state_bytes),),
        inside=((need, int(np.cumsum(change).max()) - survivor_bytes, f"recompute {name}"),),
        absent=none,
    )
