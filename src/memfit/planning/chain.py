"""The fastest acts of a step whose segment calls form a chain, by dynamic programming.

In a chain the backward goes through the calls in reverse. What a call holds waits from its forward
to its backward, and to the others only its bytes matter. So of two choices for all calls up to one
the choice that holds no more and takes no longer is the better one, whatever follows: all there is
to remember is the fewest bytes for every number of seconds. Filling a table of these, call by call,
takes the same short time for every budget, where a branching solver tries calls that are alike in
all orders. Limits: seconds count in whole units, `UNITS` for what a good choice adds; they are
rounded down, so a choice is above what is proven by at most one unit per decision. Where the host
cannot keep up, seconds of device and host are weighed against each other (Lagrange): what is proven
holds, but a choice between those of two weights is not found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import combinations

import numpy as np

from memfit.planning.acts import Act, Ints, Pick, calls_of
from memfit.planning.rows import Row

COARSE_UNITS, UNITS = 1_000, 25_000
MAX_WEIGHTS = 8
_NEVER = 2**60  # bytes of a choice that cannot be made

_Numbers = list[list[int]]


class Chain:
    """What the rows of a step ask of each act, beside the bytes that the calls before it hold.

    `waiting` is the row of a position where all calls wait for their backward: its coefficients are
    what acts hold. Held bytes are counted above those of keeping every call.
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
        self.negligible_bytes = negligible_bytes
        self.unbroken = True  # whether every row so far is that of a chain
        self._device_s, self._host_s = np.array(device_s), np.array(host_s)
        self._host_slack_s = host_slack_s
        self._first = np.array([calls_of(act)[0] for act in acts], dtype=np.int64)
        self._last = np.array([calls_of(act)[-1] for act in acts], dtype=np.int64)
        self._ending: _Numbers = [[] for _ in range(calls)]
        for number, last in enumerate(self._last):
            self._ending[last].append(number)
        self._held = waiting.coefficients
        # The most that a row counts beside what is held by the calls before: where an act is at
        # work, where a call that is kept is, and between two calls.
        self._with_act: Ints = np.zeros(len(acts), dtype=np.int64)
        self._with_kept: Ints = np.zeros(calls, dtype=np.int64)
        self._between: Ints = np.zeros(calls + 1, dtype=np.int64)
        self.add(waiting)

    def add(self, row: Row) -> None:
        """Heed one more row.

        Blocks that several calls may hold count as held where they are `negligible_bytes`; larger
        ones tie choices together that must be free of each other here.
        """
        shared = sum(row.shared.values())
        constant = row.constant + shared
        other, counted = row.coefficients != self._held, row.coefficients != 0
        # Acts on calls before `start` wait; those on calls from `stop` on do nothing here.
        start = int(self._last[other].min()) if other.any() else self.calls
        stop = int(self._first[counted].max()) + 1 if counted.any() else 0
        if stop - start > 1 or shared > self.negligible_bytes:
            self.unbroken = False
            return
        if start < stop:
            self._with_kept[start] = max(self._with_kept[start], constant)
            touching = (self._first <= start) & (start <= self._last)
        else:
            self._between[stop] = max(self._between[stop], constant)
            touching = (self._first < stop) & (stop <= self._last)
        most = np.maximum(self._with_act, constant + row.coefficients)
        self._with_act = np.where(touching, most, self._with_act)

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
        for size in (COARSE_UNITS, UNITS):
            unit_s = max(most_s, 1e-12) / size
            units = (seconds / unit_s).astype(np.int64)
            table = self._table(budget, units, size, ending)
            spent = _first_within(table[-1], _NEVER - 1)
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

    def _table(self, budget: int, units: Ints, size: int, ending: _Numbers) -> list[Ints]:
        """Before every call and at the end, the fewest bytes held for every number of units."""
        table = [_within(np.zeros(size + 1, dtype=np.int64), budget - self._between[0])]
        for call in range(self.calls):
            least = np.full(size + 1, _NEVER, dtype=np.int64)
            begin = _first_within(table[call], budget - self._with_kept[call])
            least[begin:] = table[call][begin:]
            for act in ending[call]:
                before = table[self._first[act]]
                begin = _first_within(before, budget - self._with_act[act])
                after = least[begin + units[act] :]
                np.minimum(after, before[begin : begin + len(after)] + self._held[act], out=after)
            table.append(_within(least, budget - self._between[call + 1]))
        return table

    def lowest_budget(self, barred: Collection[int] = ()) -> int:
        """The smallest budget that some acts fit into."""
        ending = self._allowed(barred)
        low, high = 0, int(max(self._with_kept.max(initial=0), self._between.max()))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(middle, ending) else (middle, high)
        return high

    def _allowed(self, barred: Collection[int]) -> _Numbers:
        """The acts that end with each call."""
        return [[act for act in acts if act not in barred] for acts in self._ending]

    def _fits(self, budget: int, ending: _Numbers) -> bool:
        """Whether any acts stay under a budget: with no regard to seconds, the leanest ones do."""
        least = np.full(self.calls + 1, _NEVER, dtype=np.int64)
        least[0] = 0 if self._between[0] <= budget else _NEVER
        for call, numbers in enumerate(ending):
            if least[call] + self._with_kept[call] <= budget:
                least[call + 1] = least[call]
            acts = np.array(numbers, dtype=np.int64)
            before = least[self._first[acts]]
            fitting = before + self._with_act[acts] <= budget
            held = (before + self._held[acts])[fitting].min(initial=least[call + 1])
            least[call + 1] = held if held + self._between[call + 1] <= budget else _NEVER
        return bool(least[-1] < _NEVER)

    def _traced(
        self, table: Sequence[Ints], units: Ints, ending: _Numbers, spent: int, budget: int
    ) -> Iterator[int]:
        """Numbers of the acts behind an entry of the last column, the last ones first.

        Of equal ways those with the variant chosen before: fewer different ones serve better.
        """
        stop, variant = self.calls, 0
        while stop:
            call, held = stop - 1, table[stop][spent]
            acts = np.array(ending[call], dtype=np.int64)
            acts = acts[units[acts] <= spent]
            before = np.array(
                [table[self._first[a]][spent - units[a]] for a in acts], dtype=np.int64
            )
            same = (before + self._held[acts] == held) & (before + self._with_act[acts] <= budget)
            ways = acts[same].tolist()
            kept = table[call][spent] == held and held + self._with_kept[call] <= budget
            act = next((a for a in ways if _variant(self.acts[a]) == variant), None)
            if kept and (variant == 0 or act is None):
                stop, variant = call, 0
                continue
            act = ways[0] if act is None else act
            yield act
            stop, spent = int(self._first[act]), spent - int(units[act])
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


def _first_within(least: Ints, limit: int) -> int:
    """The first entry of falling ones that is at most `limit`; their number if there is none."""
    return len(least) - int(np.searchsorted(least[::-1], limit, side="right"))


def _within(least: Ints, limit: int) -> Ints:
    """Falling entries with those above `limit` ruled out."""
    least[: _first_within(least, limit)] = _NEVER
    return least
