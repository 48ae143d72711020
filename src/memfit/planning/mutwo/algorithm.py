"""Algorithm B of mu-TWO: which tensors are swapped and which recomputed until the step fits.

Purandare et al., "mu-TWO: 3x Faster Multi-Model Training with Orchestration and Memory
Optimization" (MLSys 2023), for one model. Greedy: in every round the tensor that is idle longest
stands against the one that frees most bytes for its seconds, and the cheaper of the two goes, until
the memory limit holds. What is kept in the end is not looked at again, so the answer need not be
the best; it takes time quadratic in the number of tensors, and a simulation for each.

Where the paper is silent: of equals the first counts; a step that fits is left as it is; and a
limit that is met exactly is met.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from memfit.planning.mutwo.lineage import Lineage
from memfit.planning.mutwo.prefetch import Prefetches, Want
from memfit.planning.mutwo.step import (
    NEVER_S,
    RECOMPUTE,
    RETAINED,
    SWAP,
    Decision,
    Step,
    Usage,
)

Simulate = Callable[[Sequence[Decision]], Usage]


def decide(
    step: Step, limit_bytes: int | None, simulate: Simulate, host_bytes: int | None = None
) -> tuple[Decision, ...]:
    """A decision for every candidate: those taken, in order, then the ones that stay.

    `simulate` is Algorithm G: the memory of the step under the decisions so far. Without a limit,
    or where it is not reached, the loop goes on while there is anything to decide. At most
    `host_bytes` are swapped.
    """
    policy = _Policy(step, host_bytes)
    usage = simulate(())
    while limit_bytes is None or usage.peak_bytes > limit_bytes:
        if not policy.take(usage):
            break
        usage = simulate(policy.decisions)
    stay = (Decision(number, RETAINED) for number in policy.lineage.remaining)
    return (*policy.decisions, *stay)


class _Policy:
    """The state of the loop."""

    def __init__(self, step: Step, host_bytes: int | None) -> None:
        self.lineage = Lineage(step.candidates)
        self.decisions: list[Decision] = []
        self._prefetches = Prefetches(step)
        self._candidates = step.candidates
        idle_s = [step.inactive_s(c) for c in step.candidates]
        movable = (n for n, c in enumerate(step.candidates) if c.swap_s < NEVER_S)
        self._by_idleness = sorted(movable, key=lambda n: (-idle_s[n], n))
        self._host_bytes = float("inf") if host_bytes is None else host_bytes

    def take(self, usage: Usage) -> bool:
        """Decide about one more candidate; False where there is none to decide about."""
        self._refresh(usage)  # where memory is over changed with the last decision
        to_swap = next(filter(self._can_swap, self._by_idleness), None)
        to_recompute = self.lineage.best()
        recompute_s = NEVER_S if to_recompute is None else self.lineage.total_s[to_recompute]
        if to_swap is not None and self._swap(to_swap, below_s=recompute_s):
            return True
        if to_recompute is None:
            return False
        self.lineage.recompute(to_recompute)
        self.decisions.append(Decision(to_recompute, RECOMPUTE, recompute_s))
        self._refresh(usage)  # copies hide behind it, and may be needed for it
        return True

    def _can_swap(self, number: int) -> bool:
        fits = self._candidates[number].host_bytes <= self._host_bytes
        return fits and number in self.lineage.remaining

    def _swap(self, number: int, below_s: float) -> bool:
        """Swap a candidate if that adds less than so many seconds."""
        want = self._want(number)
        overhead_s = self._prefetches.overhead(want).overhead_s + self._candidates[number].drag_s
        if overhead_s >= below_s:
            return False
        prefetch = self._prefetches.add(want)
        self.lineage.swap(number)
        self._by_idleness.remove(number)
        self._host_bytes -= self._candidates[number].host_bytes
        self.decisions.append(Decision(number, SWAP, overhead_s, prefetch.prompt))
        return True

    def _want(self, number: int) -> Want:
        due = self.lineage.due(number)
        readers = (self._candidates[user] for user in self.lineage.users[number])
        read = any(reader.first_backward == due for reader in readers)
        return Want(self._candidates[number].swap_s, due, read)

    def _refresh(self, usage: Usage) -> None:
        """Place all copies back again, in the order they were decided."""
        places = [i for i, decision in enumerate(self.decisions) if decision.choice == SWAP]
        prefetches = self._prefetches.place(
            self.lineage.scheduled_s(),
            usage.over,
            (self._want(self.decisions[i].candidate) for i in places),
        )
        for i, prefetch in zip(places, prefetches, strict=True):
            if self.decisions[i].prompt != prefetch.prompt:
                self.decisions[i] = replace(self.decisions[i], prompt=prefetch.prompt)
