"""What Algorithm B of mu-TWO is told of a step: its operators, and the tensors it may decide about.

Ranks number the operators as they run: all of the forward, then all of the backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from memfit.ir.swap import HOST_GRAIN

NEVER_S = float("inf")  # the seconds of what cannot be done

RETAINED = "RETAINED"
RECOMPUTE = "RECOMPUTE"
SWAP = "SWAP"


@dataclass(frozen=True)
class Candidate:
    """A tensor kept from forward to backward, named by its position among `Step.candidates`.

    It is read last in forward by the operator of rank `last_forward`, and in backward from
    `first_backward` to `last_backward`. `recompute_s` makes it again from `sources`, the
    candidates it is made of; what is there anyhow is not named. A copy back takes `swap_s` and
    must be over when `due` begins; both copies slow down what runs beside them by `drag_s`.
    """

    name: str
    bytes: int
    last_forward: int
    first_backward: int
    last_backward: int
    recompute_s: float = NEVER_S
    sources: tuple[int, ...] = ()
    swap_s: float = NEVER_S
    drag_s: float = 0.0
    due: int = -1  # -1: its first use in backward

    @property
    def needed(self) -> int:
        """The rank of the operator that waits for the copy back."""
        return self.first_backward if self.due < 0 else self.due

    @property
    def host_bytes(self) -> int:
        """The host memory that it takes there, at most."""
        return self.bytes + HOST_GRAIN - 1


@dataclass(frozen=True)
class Step:
    """Seconds of each operator, the rank of the first one of the backward, and the candidates."""

    seconds: tuple[float, ...]
    backward: int
    candidates: tuple[Candidate, ...]

    @cached_property
    def _before_s(self) -> tuple[float, ...]:
        return tuple(accumulate(self.seconds, initial=0.0))

    def inactive_s(self, candidate: Candidate) -> float:
        """Seconds of the operators strictly between its last forward and first backward use."""
        begin, end = candidate.last_forward + 1, candidate.first_backward
        return self._before_s[end] - self._before_s[begin] if end > begin else 0.0


@dataclass(frozen=True)
class Decision:
    """What becomes of a candidate, and the seconds that was expected to add to the step.

    A swapped one leaves after its last forward use; its copy back starts with the operator of rank
    `prompt`.
    """

    candidate: int
    choice: str
    overhead_s: float = 0.0
    prompt: int | None = None


@dataclass(frozen=True)
class Usage:
    """Memory under some decisions: the peak, and the operators that run over the limit.

    Those are ranges of ranks, first and last, in order and apart from each other.
    """

    peak_bytes: int
    over: tuple[tuple[int, int], ...] = ()


def merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges in order, those that touch made one."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)
