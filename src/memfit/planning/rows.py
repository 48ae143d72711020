"""The memory of a step at one position, as a linear row over the acts a plan may choose.

Variables: one 0/1 per candidate act. A call is kept when no chosen act decides about it, so the
acts about one call exclude each other. A block that several calls may hold needs one more
variable: it is there when any of them holds it. What is in transit between device and host at a
position has variables of its own (see `lanes`); acts count here as if copies took no time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from memfit.planning.acts import Act, Ints, Pick, calls_of
from memfit.planning.effects import own_blocks
from memfit.planning.simulate import Simulator


@dataclass(frozen=True)
class Clique:
    """Choices that exclude each other: keeping `call` (if `kept`), or one of `acts`."""

    call: int
    kept: bool
    acts: frozenset[int]


Holders = frozenset[Clique]


class Held(NamedTuple):
    """A block that the running code has dropped, and who may hold it.

    It had it until the forward of call `last`, that included.
    """

    bytes: int
    holders: Holders
    last: int


@dataclass
class Row:
    """constant + coefficients . acts + sum of bytes over shared blocks, at a position.

    `held` are, by number, the blocks that several calls may hold somewhere in the step. Where only
    one may hold a block, its bytes are in the constant and the coefficients.
    """

    position: int
    constant: int
    coefficients: Ints
    shared: dict[Holders, int]
    held: dict[int, Held]


class MemoryRows:
    """Builds rows for one step and one list of candidate acts."""

    def __init__(self, simulator: Simulator, acts: Sequence[Act]) -> None:
        self.simulator = simulator
        self.acts = list(acts)
        graph = simulator.graph
        self.containing: list[list[int]] = [[] for _ in graph.calls]
        for number, act in enumerate(self.acts):
            for call in calls_of(act):
                self.containing[call].append(number)
        self._about = [np.array(numbers, dtype=np.int64) for numbers in self.containing]
        arguments = {b for call in graph.calls for b in (*call.args, *call.held.values())}
        self._shared = np.zeros(len(graph.blocks), dtype=bool)
        for block in graph.blocks:
            holders = {h.call for h in block.holds}
            self._shared[block.id] = block.id in arguments or bool(holders - {block.call})
        enters = [call.enter for call in graph.calls]
        self._last = np.searchsorted(enters, simulator.death, side="left") - 1
        self._collect()
        self.at = lru_cache(maxsize=None)(self._at)

    def _collect(self) -> None:
        """Lay out who may hold what, and when, in arrays."""
        sim, graph = self.simulator, self.simulator.graph
        replayed, held, spans = [], [], []
        # Blocks that a call's picks do not make: (first, last position, blocks, the picks).
        self._absent: list[tuple[int, int, Ints, list[int]]] = []
        picks: dict[int, list[int]] = {}
        back_from = self._back_from()
        for number, act in enumerate(self.acts):
            effect = sim.effect(act)
            spans += [(number, *standing) for standing in effect.standing]
            for block, release in zip(effect.blocks, effect.releases, strict=True):
                replayed.append((number, block, effect.need, release))
            if isinstance(act, tuple):
                until = int(effect.held_until[0]) if len(effect.held) else 0
                for call in graph.calls[act[0] : act[1] + 1] if until else ():
                    first = call.index == act[0]
                    for block in call.args if first else set(call.args) - set(call.linked):
                        held.append((number, block, call.index, until))
                continue
            if isinstance(act, Pick):
                picks.setdefault(act.call, []).append(number)
            for block, until in zip(effect.held, effect.held_until, strict=True):
                held.append((number, block, act.call, until))
            if (away := effect.away) is not None:
                for block, release in zip(away.blocks, away.releases, strict=True):
                    held.append((number, block, act.call, away.leaves))
                    replayed.append((number, block, back_from[int(block)], release))
        for index, numbers in picks.items():
            call = graph.calls[index]
            own = own_blocks(sim, call)
            forward = own[sim.birth[own] <= call.exit]
            backward = own[sim.birth[own] > call.exit]
            self._absent.append((call.enter, call.exit, forward, numbers))
            self._absent.append((call.need, call.finish, backward, numbers))
        self._spans = np.array(spans, dtype=np.int64).reshape(-1, 4)
        self._replayed = np.array(replayed, dtype=np.int64).reshape(-1, 4)
        self._holding = _Holding(held)

    def _back_from(self) -> dict[int, int]:
        """Where each moved block may be wanted first: by the last of the calls that move it."""
        aways = [a for act in self.acts if (a := self.simulator.effect(act).away) is not None]
        found: dict[int, int] = {}
        for away in aways:
            for block in away.blocks.tolist():
                found[block] = min(found.get(block, away.returns), away.returns)
        return found

    def _at(self, position: int) -> Row:
        """The row of one position of the step."""
        sim, graph = self.simulator, self.simulator.graph
        born = sim.birth <= position
        flowing = born & (position < sim.death)
        constant = graph.static_bytes + int(sim.bytes[flowing].sum())
        coefficients = np.zeros(len(self.acts), dtype=np.int64)
        waiting = born & ~flowing

        active = waiting[sim.hold_block] & (position < sim.hold_release)
        private = active & ~self._shared[sim.hold_block]
        weights = sim.bytes[sim.hold_block[private]]
        per_call = np.bincount(
            sim.hold_call[private], weights=weights, minlength=len(graph.calls)
        ).astype(np.int64)
        for call in np.flatnonzero(per_call):
            constant += int(per_call[call])
            coefficients[self._about[call]] -= per_call[call]

        number, start, until, size = self._spans.T
        span = (start <= position) & (position < until)
        np.add.at(coefficients, number[span], size[span])
        number, block, need, release = self._replayed.T
        again = (need <= position) & (position < release)
        np.add.at(coefficients, number[again], sim.bytes[block[again]])
        for first, last, blocks, numbers in self._absent:
            if first <= position <= last:
                coefficients[numbers] -= int(sim.bytes[blocks[flowing[blocks]]].sum())

        shared: dict[Holders, int] = {}
        known: dict[int, Held] = {}
        for block_id, holders in self._holders(position, active, waiting).items():
            size_of = int(sim.bytes[block_id])
            known[block_id] = Held(size_of, holders, int(self._last[block_id]))
            if len(holders) > 1:
                shared[holders] = shared.get(holders, 0) + size_of
                continue
            (only,) = holders
            if only.kept:
                constant += size_of
                coefficients[self._about[only.call]] -= size_of
            coefficients[list(only.acts)] += size_of
        return Row(position, constant, coefficients, shared, known)

    def insides(self) -> list[Row]:
        """The worst moments inside acts: one row per position where such moments lie.

        Acts with a moment at one position exclude each other, so they share a row.
        """
        extra: dict[int, dict[int, int]] = {}
        for number, act in enumerate(self.acts):
            for position, inside, _ in self.simulator.effect(act).inside:
                extra.setdefault(position, {})[number] = inside
        rows = []
        for position, inside_of in sorted(extra.items()):
            row = self.at(position)
            coefficients = row.coefficients.copy()
            for number, inside in inside_of.items():
                coefficients[number] += inside
            rows.append(replace(row, coefficients=coefficients))
        return rows

    def _holders(self, position: int, active: Ints, waiting: Ints) -> dict[int, Holders]:
        """Who may hold each shared block that the running code has dropped."""
        sim = self.simulator
        keeping = active & self._shared[sim.hold_block]
        kept = set(
            zip(*(of[keeping].tolist() for of in (sim.hold_block, sim.hold_call)), strict=True)
        )
        found: dict[int, set[Clique]] = {}
        for block, clique in self._holding.at(position, waiting.tolist(), kept):
            found.setdefault(block, set()).add(clique)
        return {block: frozenset(cliques) for block, cliques in found.items()}


class _Holding:
    """Which acts hold which blocks until when, for every block and the call it is held for."""

    def __init__(self, held: Sequence[tuple[int, int, int, int]]) -> None:
        """`held` are (act, block, call, until)."""
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for act, block, call, until in held:
            groups.setdefault((int(block), call), []).append((-int(until), act))
        self._until = {key: sorted(group) for key, group in groups.items()}
        self._clique = lru_cache(maxsize=None)(self._make)

    def _make(self, block: int, call: int, kept: bool, count: int) -> Clique:
        """The clique of a call and of the acts that hold a block for it longest."""
        longest = self._until.get((block, call), [])[:count]
        return Clique(call, kept, frozenset(act for _, act in longest))

    def at(
        self, position: int, waiting: Sequence[bool], kept: set[tuple[int, int]]
    ) -> Iterator[tuple[int, Clique]]:
        """Blocks that wait, with a clique of each call they may be held for.

        `kept` are the blocks with the calls that hold them when they are kept.
        """
        for (block, call), until in self._until.items():
            if waiting[block]:
                count = bisect_left(until, (-position, -1))
                if count and (block, call) not in kept:
                    yield block, self._clique(block, call, False, count)
        for block, call in kept:
            count = bisect_left(self._until.get((block, call), []), (-position, -1))
            yield block, self._clique(block, call, True, count)
