"""The fastest acts of a step whose segment calls form a chain, by dynamic programming.

In a chain the backward goes through the calls in reverse. What a call holds waits from its forward
to its backward, and to the others only its bytes matter. So of two choices for all calls up to one
the choice that holds no more and takes no longer is the better one, whatever follows: all there is
to remember is the fewest bytes for every number of seconds (and which of the blocks that tie calls
together are held: `ties`). Filling a table of these, call by call,
takes the same short time for every budget, where a branching solver tries calls that are alike in
all orders. Limits: seconds count in whole units, `UNITS` for what a good choice adds; they are
rounded down, so a choice is above what is proven by at most one unit per decision. Where the host
cannot keep up, seconds of device and host are weighed against each other (Lagrange): what is proven
holds, but a choice between those of two weights is not found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from memfit.planning.acts import Act, Ints, Pick, calls_of
from memfit.planning.rows import Row
from memfit.planning.ties import Reading, Ties

COARSE_UNITS, UNITS = 1_000, 25_000
TIED_UNITS = 8_000  # where ties make for several tables
MAX_WEIGHTS = 8
_NEVER = 2**60  # bytes of a choice that cannot be made

_Numbers = list[list[int]]
_Table = list[dict[int, Ints]]


class _Way(NamedTuple):
    """A decision about the calls up to `call`: from entries `before`, those from `begin` on.

    It leads to `mask`, takes so many units and holds so many bytes more.
    """

    call: int
    mask: int
    before: Ints
    begin: int
    units: int
    held: int


class Chain:
    """What the rows of a step ask of each act, beside the bytes that the calls before it hold.

    `waiting` is the row of a position where all calls wait for their backward: its coefficients are
    what acts hold. Held bytes are counted above those of keeping every call, blocks that tie calls
    together (`ties`) by themselves.
    """

    def __init__(
        self,
        calls: int,
        acts: Sequence[Act],
        device_s: Sequence[float],
        host_s: Sequence[float],
        host_slack_s: float,
        waiting: Row,
        negligible_bytes: int = 0,
    ) -> None:
        self.calls, self.acts = calls, acts
        self._device_s, self._host_s = np.array(device_s), np.array(host_s)
        self._host_slack_s = host_slack_s
        first, last = [calls_of(act)[0] for act in acts], [calls_of(act)[-1] for act in acts]
        self._first, self._last = np.array(first, np.int64), np.array(last, np.int64)
        self._ending: _Numbers = [[] for _ in range(calls)]
        for number, end in enumerate(last):
            self._ending[end].append(number)
        ties = self._ties = Ties(first, last, calls, waiting, negligible_bytes)
        reading = ties.read(waiting)
        self.unbroken = ties.few and reading is not None  # whether all rows are those of a chain
        if reading is None or not ties.few:
            return
        self._held = reading.coefficients
        # By the mask before: the mask after, and bytes more held.
        changes = [ties.act_change(act) for act in range(len(acts))]
        self._act_mask = _stacked([c.mask for c in changes], ties.masks)
        self._act_held = self._held[:, None] + _stacked([c.bytes for c in changes], ties.masks)
        changes = [ties.kept_change(call) for call in range(calls)]
        self._kept_mask = _stacked([c.mask for c in changes], ties.masks)
        self._kept_held = _stacked([c.bytes for c in changes], ties.masks)
        # The most that a row counts beside what is held by the calls before: where an act is at
        # work, where a call that is kept is, and between two calls.
        self._with_act = np.zeros((len(acts), ties.masks), dtype=np.int64)
        self._with_kept = np.zeros((calls, ties.masks), dtype=np.int64)
        self._between = np.zeros((calls + 1, ties.masks), dtype=np.int64)
        self.add(waiting)

    def add(self, row: Row) -> None:
        """Heed one more row."""
        reading = self._ties.read(row) if self.unbroken else None
        if reading is None:
            self.unbroken = False
            return
        start, stop = self._at_work(reading)
        place = start if start < stop else stop
        if stop - start > 1 or self._ties.unlike(reading.there, place):
            self.unbroken = False
            return
        constant, there, ties = reading.constant, reading.there, self._ties
        if start < stop:
            here = constant + ties.with_kept(there, start)
            self._with_kept[start] = np.maximum(self._with_kept[start], here)
            touching = (self._first <= start) & (start <= self._last)
        else:
            here = constant + ties.between(there, stop)
            self._between[stop] = np.maximum(self._between[stop], here)
            touching = (self._first < stop) & (stop <= self._last)
        for act in np.flatnonzero(touching).tolist():
            here = constant + reading.coefficients[act] + ties.with_act(there, act)
            self._with_act[act] = np.maximum(self._with_act[act], here)

    def _at_work(self, reading: Reading) -> tuple[int, int]:
        """Calls before the first number wait; those from the second on do nothing in the row."""
        other, counted = reading.coefficients != self._held, reading.coefficients != 0
        start = int(self._last[other].min()) if other.any() else self.calls
        stop = int(self._first[counted].max()) + 1 if counted.any() else 0
        for block, cliques in reading.there.items():
            waiting = self._ties.ties[block].cliques
            stop = max(stop, *(call + 1 for call in cliques))
            unlike = (c for c in {*waiting, *cliques} if waiting.get(c) != cliques.get(c))
            start = min([start, *unlike])
        return start, stop

    def fastest(
        self, budget: int, barred: Collection[int] = ()
    ) -> tuple[tuple[Act, ...], float] | None:
        """The acts that add the fewest seconds under a budget, and seconds that none go under.

        Acts whose numbers are `barred` are left out. None when nothing fits.
        """
        ending = self._allowed(barred)
        lines: list[
            tuple[float, float]
        ] = []  # of choices, their seconds: device, host beyond slack
        chosen: list[list[int]] = []
        proven_s, weight = 0.0, 0.0  # the host's weight
        for _ in range(MAX_WEIGHTS):
            found = self._least(budget, weight, ending)
            if found is None:
                return None
            numbers, least_s = found
            proven_s = max(proven_s, least_s - weight * self._host_slack_s)
            device_s = float(self._device_s[numbers].sum())
            lines.append((device_s, float(self._host_s[numbers].sum()) - self._host_slack_s))
            chosen.append(numbers)
            following = _next_weight(lines)
            if following is None or abs(following - weight) < 1e-6:
                break
            weight = following
        best = min(range(len(lines)), key=lambda number: max(lines[number]))
        return tuple(self.acts[number] for number in chosen[best]), proven_s

    def _least(
        self, budget: int, host_weight: float, ending: _Numbers
    ) -> tuple[list[int], float] | None:
        """Numbers of the acts that add the fewest weighted seconds, and what is proven of these.

        A coarse table says how far a fine one must reach.
        """
        seconds = (1 - host_weight) * self._device_s + host_weight * self._host_s
        most_s = self._most_seconds(seconds)
        numbers: list[int] = []
        least_s = 0.0
        for size in (COARSE_UNITS, UNITS if self._ties.masks == 1 else TIED_UNITS):
            unit_s = max(most_s, 1e-12) / size
            units = (seconds / unit_s).astype(np.int64)
            table = self._table(budget, units, size, ending)
            spent = _first_within(table[-1][0], _NEVER - 1) if table[-1] else size + 1
            if spent > size:
                return None
            numbers = list(self._traced(table, units, ending, spent, budget))[::-1]
            most_s, least_s = float(seconds[numbers].sum()), spent * unit_s
        return numbers, least_s

    def _most_seconds(self, seconds: Ints) -> float:
        """No choice adds more: for every call the seconds of its dearest act."""
        dearest = np.zeros(self.calls)
        each = seconds / (self._last - self._first + 1)
        for call in range(self.calls):
            covering = (self._first <= call) & (call <= self._last)
            dearest[call] = each[covering].max(initial=0.0)
        return float(dearest.sum())

    def _table(self, budget: int, units: Ints, size: int, ending: _Numbers) -> _Table:
        """Before every call and at the end, by mask, the fewest bytes held for so many units."""
        allowed = np.array([act for acts in ending for act in acts], dtype=np.int64)
        coming: list[list[_Way]] = [[] for _ in range(self.calls)]
        entries: dict[int, Ints] = {0: np.zeros(size + 1, dtype=np.int64)}
        table: _Table = []
        for place in range(self.calls + 1):
            for mask, held in entries.items():
                _within(held, budget - self._between[place, mask])
            table.append(entries)
            if place == self.calls:
                break
            starting = allowed[self._first[allowed] == place]
            for mask, before in entries.items():
                for way in self._ways(place, mask, before, starting, budget, units):
                    if way.begin + way.units <= size:
                        coming[way.call].append(way)
            entries = {}
            for way in coming[place]:
                if way.mask not in entries:
                    entries[way.mask] = np.full(size + 1, _NEVER, dtype=np.int64)
                after = entries[way.mask][way.begin + way.units :]
                reached = way.before[way.begin : way.begin + len(after)] + way.held
                np.minimum(after, reached, out=after)
        return table

    def _ways(
        self, place: int, mask: int, before: Ints, acts: Ints, budget: int, units: Ints
    ) -> Iterator[_Way]:
        """Where the entries of one mask lead: the next call is kept, or one of the acts follows."""
        limits = budget - np.append(self._with_act[acts, mask], self._with_kept[place, mask])
        begins = (len(before) - np.searchsorted(before[::-1], limits, side="right")).tolist()
        kept = begins.pop()
        change = int(self._kept_mask[place, mask]), int(self._kept_held[place, mask])
        yield _Way(place, change[0], before, kept, 0, change[1])
        columns = self._last, self._act_mask[:, mask], units, self._act_held[:, mask]
        of_acts = zip(*(column[acts].tolist() for column in columns), strict=True)
        for begin, (call, after, spent, held) in zip(begins, of_acts, strict=True):
            yield _Way(call, after, before, begin, spent, held)

    def lowest_budget(self, barred: Collection[int] = ()) -> int:
        """The smallest budget that some acts fit into."""
        ending = self._allowed(barred)
        kept = sum(tie.bytes for tie in self._ties.ties.values())
        low, high = 0, int(max(self._with_kept.max(initial=0), self._between.max())) + kept
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(middle, ending) else (middle, high)
        return high

    def _allowed(self, barred: Collection[int]) -> _Numbers:
        """The acts that end with each call."""
        return [[act for act in acts if act not in barred] for acts in self._ending]

    def _fits(self, budget: int, ending: _Numbers) -> bool:
        """Whether any acts stay under a budget: with no regard to seconds, the leanest ones do."""
        least = np.full((self.calls + 1, self._ties.masks), _NEVER, dtype=np.int64)
        least[0, 0] = 0 if self._between[0, 0] <= budget else _NEVER
        for call, numbers in enumerate(ending):
            before, after = least[call], least[call + 1]
            fitting = before + self._with_kept[call] <= budget
            held = (before + self._kept_held[call])[fitting]
            np.minimum.at(after, self._kept_mask[call][fitting], held)
            acts = np.array(numbers, dtype=np.int64)
            before = least[self._first[acts]]
            fitting = before + self._with_act[acts] <= budget
            held = (before + self._act_held[acts])[fitting]
            np.minimum.at(after, self._act_mask[acts][fitting], held)
            after[after + self._between[call + 1] > budget] = _NEVER
        return bool(least[-1, 0] < _NEVER)

    def _traced(
        self, table: _Table, units: Ints, ending: _Numbers, spent: int, budget: int
    ) -> Iterator[int]:
        """Numbers of the acts behind an entry of the last column, the last ones first.

        Of equal ways those with the variant chosen before: fewer different ones serve better.
        """
        stop, mask, variant = self.calls, 0, 0
        while stop:
            call, held = stop - 1, table[stop][mask][spent]
            ways = {
                act: before
                for act in ending[call]
                for before, entries in table[self._first[act]].items()
                if units[act] <= spent
                and self._act_mask[act, before] == mask
                and entries[spent - units[act]] + self._act_held[act, before] == held
                and entries[spent - units[act]] + self._with_act[act, before] <= budget
            }
            kept = next(
                (
                    before
                    for before, entries in table[call].items()
                    if self._kept_mask[call, before] == mask
                    and entries[spent] + self._kept_held[call, before] == held
                    and entries[spent] + self._with_kept[call, before] <= budget
                ),
                None,
            )
            act = next((a for a in ways if _variant(self.acts[a]) == variant), None)
            if kept is not None and (variant == 0 or act is None):
                stop, mask, variant = call, kept, 0
                continue
            act = next(iter(ways)) if act is None else act
            yield act
            stop, mask, spent = int(self._first[act]), ways[act], spent - int(units[act])
            variant = _variant(self.acts[act])


def _next_weight(lines: Sequence[tuple[float, float]]) -> float | None:
    """The host's weight where the least of these lines is highest; None if they settle it.

    A choice with so many seconds of the device and of the host is a line over the weight.
    """
    if len(lines) == 1:
        device_s, host_s = lines[0]
        return 1.0 if host_s > device_s else None
    candidates = [0.0, 1.0]
    for (a, b), (c, d) in combinations(lines, 2):
        if (slope := (b - a) - (d - c)) != 0 and 0 < (weight := (c - a) / slope) < 1:
            candidates.append(weight)
    return max(candidates, key=lambda w: min((1 - w) * a + w * b for a, b in lines))


def _variant(act: Act) -> int:
    """The number of a pick's variant; -1 for other acts."""
    return act.variant if isinstance(act, Pick) else -1


def _stacked(rows: Sequence[Ints], width: int) -> Ints:
    return np.array(rows, dtype=np.int64).reshape(-1, width)


def _first_within(least: Ints, limit: int) -> int:
    """The first entry of falling ones that is at most `limit`; their number if there is none."""
    return len(least) - int(np.searchsorted(least[::-1], limit, side="right"))


def _within(least: Ints, limit: int) -> Ints:
    """Falling entries with those above `limit` ruled out."""
    least[: _first_within(least, limit)] = _NEVER
    return least
