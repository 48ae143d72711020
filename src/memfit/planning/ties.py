"""Blocks that tie the calls of a chain together: several calls may hold them, they are there once.

A block of a residual network is read by the backward of the call that made it and by that of the
next one. Going through the calls in order, all there is to remember of such a block is whether any
call so far holds it: a bit, from its first holder to its last. So it is with a block that the
running code has in the forward of later calls, for there it does not matter who holds it. A mask
has the bits of the blocks that are open before a call. Small blocks are not worth a bit and count
as held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memfit.planning.acts import Ints
from memfit.planning.rows import Clique, Held, Row

MAX_OPEN = 3  # ties that lie across one place: every one doubles what there is to remember

Cliques = Mapping[int, Clique]  # by call


@dataclass(frozen=True)
class Tie:
    """A block of so many bytes, and from which call to which it matters who holds it."""

    bytes: int
    cliques: Cliques
    first: int
    last: int


@dataclass(frozen=True)
class Reading:
    """A row with its ties taken out of the numbers; `there` are the ties that it counts."""

    constant: int
    coefficients: Ints
    there: Mapping[int, Cliques]


@dataclass(frozen=True)
class Change:
    """What a decision does, by the mask before it: the mask after it, and bytes more held."""

    mask: Ints
    bytes: Ints


class Ties:
    """The ties of a chain, as the row of a position where all calls wait shows them."""

    def __init__(
        self, first: Sequence[int], last: Sequence[int], calls: int, waiting: Row, negligible: int
    ) -> None:
        """`first` and `last` are the calls of each act; `negligible` bytes may be overrated."""
        self._first, self._last, self._negligible = first, last, negligible
        self._about: list[list[int]] = [[] for _ in range(calls)]
        for act, (begin, end) in enumerate(zip(first, last, strict=True)):
            for call in range(begin, end + 1):
                self._about[call].append(act)
        self.ties: dict[int, Tie] = {}
        self._small: set[int] = set()
        small_bytes = 0
        for block, held in sorted(waiting.held.items(), key=lambda item: item[1].bytes):
            cliques = _cliques(held)
            tie = Tie(held.bytes, cliques, min(cliques), max([held.last, *cliques]))
            if tie.first == tie.last:
                continue
            small_bytes += held.bytes
            if small_bytes <= negligible:
                self._small.add(block)
            else:
                self.ties[block] = tie
        # Before every call and at the end.
        self.open: list[list[int]] = [
            [b for b, tie in self.ties.items() if tie.first < place <= tie.last]
            for place in range(calls + 1)
        ]
        self.few = max(map(len, self.open)) <= MAX_OPEN
        self.masks = 1 << max(map(len, self.open)) if self.few else 1
        self._with_act: list[list[tuple[int, Tie]]] = [[] for _ in first]
        for block, tie in self.ties.items():
            for act in {act for clique in tie.cliques.values() for act in clique.acts}:
                self._with_act[act].append((block, tie))

    def read(self, row: Row) -> Reading | None:
        """The row without its ties; None where it ties calls together in another way."""
        constant, coefficients = row.constant, row.coefficients.copy()
        there: dict[int, Cliques] = {}
        others = sum(row.shared.values())
        for block, held in row.held.items():
            if block not in self.ties and block not in self._small:
                continue
            if len(held.holders) == 1:
                (only,) = held.holders
                if only.kept:
                    constant -= held.bytes
                    coefficients[self._about[only.call]] += held.bytes
                coefficients[list(only.acts)] -= held.bytes
            else:
                others -= held.bytes
            if block in self.ties:
                there[block] = _cliques(held)
            else:
                constant += held.bytes
        if others > self._negligible:
            return None
        return Reading(constant + others, coefficients, there)

    def unlike(self, there: Mapping[int, Cliques], place: int) -> bool:
        """Whether ties before a place count otherwise than they do where all calls wait."""
        return any(block not in there and tie.last < place for block, tie in self.ties.items())

    def act_change(self, act: int) -> Change:
        """What an act does."""
        holding = {block for block, _ in self._with_act[act]}
        return self._change(self._first[act], self._last[act] + 1, holding)

    def kept_change(self, call: int) -> Change:
        """What keeping a call does."""
        holding = {b for b, tie in self.ties.items() if _keeps(tie.cliques, call)}
        return self._change(call, call + 1, holding)

    def _change(self, place: int, after: int, holding: set[int]) -> Change:
        masks, sizes = np.zeros(self.masks, dtype=np.int64), np.zeros(self.masks, dtype=np.int64)
        for mask in range(self.masks):
            before = set(self._blocks(place, mask))
            now = before | holding
            bits = [1 << bit for bit, block in enumerate(self.open[after]) if block in now]
            masks[mask] = sum(bits)
            sizes[mask] = sum(self.ties[block].bytes for block in now - before)
        return Change(masks, sizes)

    def with_act(self, there: Mapping[int, Cliques], act: int) -> Ints:
        """By the mask before an act, what a row counts more than what is held by then."""
        holding = {b for b, c in there.items() if any(act in q.acts for q in c.values())}
        return self._more(there, self._first[act], holding)

    def with_kept(self, there: Mapping[int, Cliques], call: int) -> Ints:
        """The same for a call that is kept."""
        return self._more(there, call, {b for b, c in there.items() if _keeps(c, call)})

    def between(self, there: Mapping[int, Cliques], place: int) -> Ints:
        """The same before a call."""
        return self._more(there, place, ())

    def _more(self, there: Mapping[int, Cliques], place: int, holding: Iterable[int]) -> Ints:
        found = np.zeros(self.masks, dtype=np.int64)
        for mask in range(self.masks):
            before = set(self._blocks(place, mask))
            found[mask] = sum(self.ties[b].bytes for b in holding if b not in before)
            # What the running code still has is in the row anyhow.
            found[mask] -= sum(self.ties[b].bytes for b in before if b not in there)
        return found

    def _blocks(self, place: int, mask: int) -> Iterator[int]:
        return (block for bit, block in enumerate(self.open[place]) if mask >> bit & 1)


def _cliques(held: Held) -> Cliques:
    return {clique.call: clique for clique in held.holders}


def _keeps(cliques: Cliques, call: int) -> bool:
    return call in cliques and cliques[call].kept
