"""The two copy directions as rows of a linear program: what is in transit when, and who waits.

For every segment call one column holds the bytes still on their way out while its forward runs, and
one those already back, early, while its backward runs; others hold the seconds the compute waits
before it. What calls send adds to the first, what a lane carries in a call's seconds takes from it,
though the last of a call's tensors, of a captured one all, are there only when the call is over;
the way back is the same with time reversed. Limits: bytes flow (a bundle may be half out), so what
the program finds is scheduled and simulated again; a block that two calls may move counts half for
each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property

from memfit.planning.acts import Act, calls_of
from memfit.planning.simulate import Simulator

# One row: column -> coefficient, and the upper bound. Acts are columns >= 0, others see `Lanes`.
LaneRow = tuple[dict[int, float], float]


class Lanes:
    """Columns and rows of the lanes, for one list of candidate acts.

    The columns follow `first`: bytes in transit per forward, the same per backward (with one for
    the loss before them), seconds waited after each forward, for what is back before the first
    backward, and before each backward. Bytes are divided by `scale`, seconds by `total_s`.
    """

    def __init__(
        self, simulator: Simulator, acts: Sequence[Act], scale: float, total_s: float
    ) -> None:
        self.simulator, self.copies = simulator, simulator.copies
        self.acts, self.scale, self.total_s = acts, scale, total_s
        self.aways = {n: a for n, act in enumerate(acts) if (a := simulator.effect(act).away)}
        graph = simulator.graph
        self.calls, self.order = len(graph.calls), simulator.copies.order
        self.active = bool(self.aways) and simulator.copies.overlap
        self._enters = [call.enter for call in graph.calls]
        self._needs = [graph.calls[c].need for c in self.order]

    @property
    def columns(self) -> int:
        """How many columns the lanes add."""
        return 2 * (self.calls + len(self.order) + 1) if self.active else 0

    @property
    def waits(self) -> range:
        """The columns of seconds waited."""
        return range(self.calls + len(self.order) + 1, self.columns)

    @property
    def nothing(self) -> list[int]:
        """Columns that are 0: nothing is in transit in the first forward and the last backward."""
        return [0, self.calls + len(self.order)] if self.active else []

    def column_at(self, position: int) -> int | None:
        """The column of the bytes in transit at a position of the step."""
        graph = self.simulator.graph
        if not self.active or position < self._enters[0] or position >= graph.backward_end:
            return None
        if position < graph.model_end:
            return bisect_right(self._enters, position) - 1
        return self.calls + bisect_right(self._needs, position)

    def host_bytes(self) -> dict[int, float]:
        """The host memory that each act takes."""
        return {n: self._sizes(n) + away.rounding_bytes for n, away in self.aways.items()}

    def rows(self, first: int, share: float) -> Iterator[LaneRow]:
        """Rows over the acts and the lanes' columns, which begin at `first`.

        `share` of the lanes' bytes per second are used.
        """
        rates = self.copies.rates
        if not self.active or rates is None:
            return
        out = share * rates.out_bytes_per_s * self.total_s / self.scale  # per unit of time
        back = share * rates.in_bytes_per_s * self.total_s / self.scale
        sent = self._by_call(rates.out_bytes_per_s * rates.latency_s)
        wanted = self._by_call(rates.in_bytes_per_s * rates.latency_s)
        transit, early = first, first + self.calls
        waits = first + self.waits.start
        for call in range(self.calls):
            # After the forward of `call`, before the next one or at the model's end.
            row = {waits + call: -out}
            if call + 1 < self.calls:
                row[transit + call + 1] = -1.0
            yield self._last(sent[call]) | row, 0.0
            seconds = self.copies.forward_s[call] / self.total_s
            yield {**sent[call], **row, transit + call: 1.0}, out * seconds
        # Between the model's forward and the first backward nothing is known to run.
        yield {early: 1.0, waits + self.calls: -back}, 0.0
        later = waits + self.calls + 1
        for number, call in enumerate(self.order):
            # Before the backward of `call`: what it wants, and what came early for later ones.
            row = {later + number: -back, early + number: -1.0}
            yield self._last(wanted[call]) | row, 0.0
            seconds = self.copies.backward_s[call] / self.total_s
            row |= {**wanted[call], early + number + 1: 1.0}
            for act, added_s in self._added_s.get(call, ()):
                row[act] = row.get(act, 0.0) - back * added_s / self.total_s
            yield row, back * seconds

    def _by_call(self, overhead_bytes: float) -> list[dict[int, float]]:
        """For each call the acts that move something of it, with scaled bytes."""
        found: list[dict[int, float]] = [{} for _ in range(self.calls)]
        for number, away in self.aways.items():
            size = self._sizes(number) + away.tensors * overhead_bytes
            found[away.call][number] = size / self.scale
        return found

    def _last(self, sizes: dict[int, float]) -> dict[int, float]:
        """Of what acts send, what is saved when the call ends."""
        return {n: size / self.aways[n].moments for n, size in sizes.items()}

    def _sizes(self, number: int) -> float:
        away = self.aways[number]
        sizes = self.simulator.bytes
        shared = sum(int(sizes[b]) / self._movers[b] for b in away.blocks.tolist())
        return away.own_bytes + shared

    @cached_property
    def _movers(self) -> dict[int, int]:
        """How many calls may move each block."""
        calls: dict[int, set[int]] = {}
        for away in self.aways.values():
            for block in away.blocks.tolist():
                calls.setdefault(block, set()).add(away.call)
        return {block: len(found) for block, found in calls.items()}

    @cached_property
    def _added_s(self) -> dict[int, list[tuple[int, float]]]:
        """Acts with the seconds they add to the backward of a call, by that call."""
        found: dict[int, list[tuple[int, float]]] = {}
        passes = self.simulator.profile.passes
        for number, act in enumerate(self.acts):
            added_s = self.simulator.seconds_of(act) / passes
            found.setdefault(calls_of(act)[-1], []).append((number, added_s))
        return found
