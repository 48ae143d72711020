"""Algorithm C of mu-TWO: what a swap adds to the step, and where its copy back must start.

The copy has to be over when the tensor is due. It hides behind the backward operators before that,
walking back, and behind recomputations among them, but not in stretches where memory is over the
limit: there is no room to bring it back to. Copies run one at a time: one that is due while another
runs goes before it. In a step of one model there is no other forward to hide behind.

Where the paper's prompts are operators, these are moments: what a copy leaves of an operator's
seconds is there for the next. Limits: a wait for a copy does not move the operators after it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memfit.planning.mutwo.step import Step


@dataclass(frozen=True)
class Want:
    """A copy back of so many seconds, over before operator `due`.

    With `before_recompute` the recomputation that runs just before `due` reads the tensor, too.
    """

    swap_s: float
    due: int
    before_recompute: bool = False


@dataclass(frozen=True)
class Prefetch:
    """A copy back that starts with operator `prompt`, and the seconds that wait for it.

    `start_s` and `end_s` are moments of the backward, waits left out.
    """

    prompt: int
    overhead_s: float
    start_s: float
    end_s: float


class Prefetches:
    """The copies back of a step, each as late as it can be without a wait."""

    def __init__(self, step: Step) -> None:
        self._seconds = np.array(step.seconds[step.backward :], dtype=np.float64)
        self._first = step.backward
        self.place({}, (), ())

    def place(
        self,
        recompute_s: Mapping[int, float],
        over: Sequence[tuple[int, int]],
        wants: Iterable[Want],
    ) -> list[Prefetch]:
        """Start anew: these seconds of recomputing before operators, these ranks over the limit,
        these copies one after the other."""
        again = np.zeros(len(self._seconds))
        for rank, seconds in recompute_s.items():
            again[rank - self._first] += seconds
        self._again = again
        # When each operator's turn comes: what is recomputed for it runs first.
        self._begin = np.concatenate(([0.0], np.cumsum(self._seconds + again)))
        inside = [(max(a, self._first), b) for a, b in over if b >= self._first]
        self._over_from = [float(self._begin[a - self._first]) for a, _ in inside]
        self._over_until = [float(self._begin[b + 1 - self._first]) for _, b in inside]
        self._last_s = float("inf")  # when the earliest of the copies starts: the last prompt
        self._starts: list[float] = []  # of copies that run beside operators, rising when negated
        self._ends: list[float] = []
        return [self.add(want) for want in wants]

    def add(self, want: Want) -> Prefetch:
        """Place one more copy."""
        found = self.overhead(want)
        if found.end_s > found.start_s:
            self._starts.append(-found.start_s)
            self._ends.append(found.end_s)
        self._last_s = min(self._last_s, found.start_s)
        return found

    def overhead(self, want: Want) -> Prefetch:
        """What one more copy would add, and where it would start."""
        due = want.due - self._first
        turn_s = float(self._begin[due])
        needed_s = turn_s if want.before_recompute else turn_s + float(self._again[due])
        end_s = min(needed_s, self._last_s)
        walk_from_s = min(turn_s, end_s)
        # What is recomputed for the operator itself hides the copy even where memory is over.
        at_hand_s = end_s - walk_from_s
        before_s, reached = self._room(walk_from_s)
        hidden_s = min(want.swap_s, at_hand_s + before_s)
        overhead_s = want.swap_s - hidden_s
        if hidden_s <= 0:
            end_s = needed_s  # nobody is helped by an early start
        if reached and overhead_s > 0:
            overhead_s += self._remaining(needed_s)
        start_s = end_s - hidden_s
        prompt = int(np.searchsorted(self._begin, start_s, side="right")) - 1
        return Prefetch(min(prompt, due) + self._first, overhead_s, start_s, end_s)

    def _room(self, until_s: float) -> tuple[float, bool]:
        """Seconds before a moment up to where memory is over the limit; whether it is so there."""
        stretch = bisect_left(self._over_from, until_s) - 1
        if stretch < 0:
            return until_s, False
        room_s = until_s - self._over_until[stretch]
        return max(room_s, 0.0), room_s <= 0

    def _remaining(self, moment_s: float) -> float:
        """Seconds that a copy under way then still takes, waits that it has of its own left out."""
        place = bisect_right(self._starts, -moment_s)  # the last that starts before
        return max(self._ends[place] - moment_s, 0.0) if place < len(self._starts) else 0.0
