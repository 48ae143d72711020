"""One step under given acts as a Replay: every tensor by name, and every position on the clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from memfit.ir.plan import Plan
from memfit.ir.replay import LiveTensor, Replay
from memfit.ir.step_graph import PHASES
from memfit.planning.acts import Act, Effect, Pick
from memfit.planning.clock import backward_end, clock_and_work, phase_ends
from memfit.planning.naming import INSIDE, SMALLER, Named, Names
from memfit.planning.simulate import Simulator
from memfit.planning.write_plan import read_acts

MADE_AGAIN, BACK = " (made again)", " (back from the host)"


def replay(simulator: Simulator, acts: Sequence[Act], step_s: float | None = None) -> Replay:
    """The step under `acts`; `step_s` is how long it takes, if the simulator is not to say."""
    seconds = simulator.step_seconds(acts) if step_s is None else step_s
    clock, work = clock_and_work(simulator, acts, seconds / simulator.profile.passes)
    tensors = tuple(t for t in _tensors(simulator, acts) if t.bytes > 0 and t.start < t.end)
    places = _places(simulator)
    return Replay(simulator.graph.length, tensors, clock, work, places)


def replay_plan(simulator: Simulator, plan: Plan) -> Replay:
    """The step under a plan that was made for it, as long as the plan expects it to take."""
    return replay(simulator, read_acts(simulator, plan), plan.predicted.step_s)


def live_at(simulator: Simulator, acts: Sequence[Act], position: int) -> list[LiveTensor]:
    """What is alive at a position of the step under `acts`."""
    return [t for t in _tensors(simulator, acts) if t.start <= position < t.end]


def _tensors(sim: Simulator, acts: Sequence[Act]) -> Iterator[LiveTensor]:
    """All memory of the step: its categories sum to the simulator's at every position."""
    length, blocks = sim.graph.length, sim.graph.blocks
    names = Names(sim)
    for name, size in sim.graph.static.items():
        yield LiveTensor(name.replace("_", " "), name, size, 0, length)
    deaths = sim.deaths(acts).tolist()
    for block in blocks:
        named = names.block(block.id)
        yield _live(named, block.category, block.bytes, block.birth, min(deaths[block.id], length))
    for block_id, (returns, release) in sim.copied_back(acts).items():
        named = names.block(block_id, BACK)
        yield _live(named, "activations", blocks[block_id].bytes, returns, release)
    for act in acts:
        effect = sim.effect(act)
        yield from _standing(sim, names, act, effect)
        ends = zip(effect.blocks.tolist(), effect.releases.tolist(), strict=True)
        for block_id, release in ends:
            named = names.block(block_id, MADE_AGAIN)
            yield _live(named, "activations", blocks[block_id].bytes, effect.need, release)
    yield from _moments(sim, names, acts)


def _standing(sim: Simulator, names: Names, act: Act, effect: Effect) -> Iterator[LiveTensor]:
    """What an act holds beside the step's blocks: a variant's own tensors, generator states."""
    # Of a pick: what it keeps; what it moves, until that has left; and once that is back.
    for number, (start, until, size) in enumerate(effect.standing):
        parts: Sequence[tuple[Named, int]] = []
        rest = Named("generator states", "")
        if isinstance(act, Pick):
            call, variant = sim.graph.calls[act.call], sim.variant(act)
            if start == call.finish:
                yield _live(Named("gradient", call.name), "activations", size, start, until)
                continue
            kept = set(variant.saved) - set(variant.moved)
            parts = names.own(call, variant.moved if number else kept, BACK if number == 2 else "")
            rest = Named(SMALLER, call.name)
        for named, part in _split(size, parts, rest):
            yield _live(named, "activations", part, start, until)


def _split(
    size: int, parts: Iterable[tuple[Named, int]], rest: Named
) -> Iterator[tuple[Named, int]]:
    """Named parts of `size` bytes: a measured size may differ a little from that of its parts."""
    for named, part in parts:
        if part <= size:
            yield named, part
            size -= part
    yield rest, size


def _moments(sim: Simulator, names: Names, acts: Sequence[Act]) -> Iterator[LiveTensor]:
    """What segments need for a moment inside one position: the most of each position."""
    found = [
        (position, extra, what, act)
        for act in acts
        for position, extra, what in sim.effect(act).inside
    ]
    found.sort(key=lambda moment: moment[:2])
    for position, moments in groupby(found, key=lambda moment: moment[0]):
        _, extra, what, act = list(moments)[-1]
        named = Named(f"{INSIDE}{what}", what.partition(" ")[2])
        if isinstance(act, Pick):
            call = sim.graph.calls[act.call]
            named = names.inside(call, sim.variant(act), what)
        yield _live(named, "temporaries", extra, position, position + 1)


def _live(named: Named, category: str, size: int, start: int, end: int) -> LiveTensor:
    return LiveTensor(
        named.name,
        category,
        size,
        start,
        end,
        named.module,
        named.source,
        named.shape,
        named.file,
        named.line,
    )


def _places(sim: Simulator) -> tuple[tuple[int, str], ...]:
    """Where each stretch of positions begins, and what happens there."""
    graph = sim.graph
    ends = (*phase_ends(graph), graph.length)
    starts = (0, *ends[:-1])
    places = [phase for phase, a, b in zip(PHASES, starts, ends, strict=True) for _ in range(a, b)]
    for call in graph.calls:
        places[call.enter : call.exit] = [f"forward {call.name}"] * (call.exit - call.enter)
        start, end = call.need, backward_end(call)
        if start >= 0:
            places[start:end] = [f"backward {call.name}"] * (end - start)
    changes = [p for p, here in enumerate(places) if p == 0 or here != places[p - 1]]
    return tuple((p, places[p]) for p in changes)
