"""Algorithms D to F of mu-TWO: what recomputing costs while more and more is recomputed.

Every candidate is made again from its sources. When one of these is not there any more, the sources
it was made of itself take its place, and its seconds are added. Limits, all of them the paper's:
two sources with a common ancestor that is gone pay for it twice; and a source of what was chosen
last is priced at that one's count alone, without its own use and without other recomputations.
"""

from __future__ import annotations

from collections.abc import Sequence

from memfit.planning.mutwo.step import NEVER_S, RECOMPUTE, RETAINED, SWAP, Candidate


class Lineage:
    """Sources, seconds and counts of all candidates under the decisions so far."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = candidates
        count = len(candidates)
        self.choice = [RETAINED] * count
        self.remaining = dict.fromkeys(range(count))
        self.sources = [set(c.sources) for c in candidates]
        self.recompute_s = [c.recompute_s for c in candidates]
        self.recompute_count = [0] * count
        self.total_s = [c.recompute_s for c in candidates]
        # Who reads each candidate to be recomputed: those chosen, and those that remain.
        self.users: list[set[int]] = [set() for _ in candidates]
        self.wanted_by: list[set[int]] = [set() for _ in candidates]
        for number, sources in enumerate(self.sources):
            for source in sources:
                self.wanted_by[source].add(number)

    def ratio(self, number: int) -> float:
        """Bytes freed for each second of recomputing."""
        total_s = self.total_s[number]
        return self.candidates[number].bytes / total_s if total_s > 0 else float("inf")

    def best(self) -> int | None:
        """The remaining candidate that frees most per second; of equals the first."""
        able = (n for n in self.remaining if self.total_s[n] < NEVER_S)
        return max(able, key=lambda n: (self.ratio(n), -n), default=None)

    def live(self, number: int) -> tuple[int, int]:
        """First and last rank of the backward between which the candidate is there.

        Recomputations that read it are uses like others, but for one that is recomputed itself:
        those have its sources instead.
        """
        candidate = self.candidates[number]
        ranks = [candidate.first_backward, candidate.last_backward]
        if self.choice[number] != RECOMPUTE:
            ranks += [self.candidates[user].first_backward for user in self.users[number]]
        return min(ranks), max(ranks)

    def due(self, number: int) -> int:
        """The operator before which a swapped candidate must be back."""
        return min(self.candidates[number].needed, self.live(number)[0])

    def recompute(self, number: int) -> None:
        """Decide to recompute; update earlier recomputations (E) and what remains (F)."""
        del self.remaining[number]
        count = 1
        for user in sorted(self.users[number]):
            self._make_without(user, number)
            count += 1
        self.recompute_count[number] = count
        self.choice[number] = RECOMPUTE
        for source in self.sources[number]:
            self.wanted_by[source].discard(number)
            self.users[source].add(number)
        self._update_wanting(number)
        for source in self.sources[number]:
            if source in self.remaining:
                self.total_s[source] = count * self.recompute_s[source]

    def swap(self, number: int) -> None:
        """Decide to swap; update what remains (F). Recomputations that read it get it in time."""
        del self.remaining[number]
        self.choice[number] = SWAP
        for source in self.sources[number]:
            self.wanted_by[source].discard(number)
        self._update_wanting(number)

    def scheduled_s(self) -> dict[int, float]:
        """Seconds of recomputing just before operators, by their rank."""
        found: dict[int, float] = {}
        for number, choice in enumerate(self.choice):
            if choice == RECOMPUTE:
                rank = self.candidates[number].first_backward
                found[rank] = found.get(rank, 0.0) + self.recompute_s[number]
        return found

    def _update_wanting(self, gone: int) -> None:
        """Remaining candidates made of one that is gone are made of its sources instead."""
        for number in sorted(self.wanted_by[gone]):
            if self._there(gone, number):
                continue
            self._make_without(number, gone)
            self.total_s[number] = self.recompute_s[number] * (1 + len(self.users[number]))

    def _there(self, source: int, reader: int) -> bool:
        """Whether a source is on the device when its reader would be recomputed.

        For a recomputation that is chosen, a swapped one is brought back in time.
        """
        choice = self.choice[source]
        if choice == RETAINED or (choice == SWAP and self.choice[reader] == RECOMPUTE):
            return True
        first, last = self.live(source)
        return first <= self.candidates[reader].first_backward <= last

    def _make_without(self, reader: int, gone: int) -> None:
        """Put the sources of one that is gone in its place, those of gone ones likewise."""
        chosen = self.choice[reader] == RECOMPUTE
        readers = self.users if chosen else self.wanted_by
        stack, seen = [gone], {gone}
        while stack:
            missing = stack.pop()
            self.sources[reader].discard(missing)
            readers[missing].discard(reader)
            self.recompute_s[reader] += self.recompute_s[missing]
            if chosen and missing != gone:
                self.recompute_count[missing] += 1
            for source in sorted(self.sources[missing] - seen):
                seen.add(source)
                if self._there(source, reader):
                    self.sources[reader].add(source)
                    readers[source].add(reader)
                elif source not in self.sources[reader]:
                    stack.append(source)
