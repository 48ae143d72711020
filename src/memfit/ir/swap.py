"""What swapping did: bytes moved, how fast, and how much of it the step had to wait for."""

from __future__ import annotations

from dataclasses import dataclass

HOST_GRAIN = 512  # host memory for a tensor is a multiple of it


@dataclass(frozen=True)
class Traffic:
    """The copies of one direction.

    `busy_s` is the time the direction was copying, `stalled_s` the time the computation waited
    for it, in `stalls` waits.
    """

    bytes: int = 0
    copies: int = 0
    busy_s: float = 0.0
    stalled_s: float = 0.0
    stalls: int = 0

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes per second while copying; 0 when nothing was copied."""
        return self.bytes / self.busy_s / 1e9 if self.busy_s > 0 else 0.0

    @property
    def hidden_share(self) -> float:
        """The share of the copying that the computation did not wait for, from 0 to 1."""
        return _hidden(self.stalled_s, self.busy_s)


@dataclass(frozen=True)
class SwapStatistics:
    """What a swap engine did in `steps` steps: totals, see `per_step` for one of them.

    `moves` are pieces of memory copied out, `retrievals` those of them copied back, `late` those
    whose copy back began only when they were asked for, `stayed` those that were asked for before
    they were let go, and pieces that were not moved because host memory had no room for them.
    """

    steps: int
    moves: int
    retrievals: int
    late: int
    stayed: int
    out: Traffic
    back: Traffic
    host_bytes: int
    host_highest_bytes: int

    @property
    def moved_bytes(self) -> int:
        """Bytes copied to the host."""
        return self.out.bytes

    @property
    def restored_bytes(self) -> int:
        """Bytes copied back."""
        return self.back.bytes

    @property
    def out_gb_per_s(self) -> float:
        """10^9 bytes per second to the host, while copying."""
        return self.out.gb_per_s

    @property
    def in_gb_per_s(self) -> float:
        """10^9 bytes per second back to the device, while copying."""
        return self.back.gb_per_s

    @property
    def out_busy_s(self) -> float:
        """Seconds of copying to the host."""
        return self.out.busy_s

    @property
    def in_busy_s(self) -> float:
        """Seconds of copying back."""
        return self.back.busy_s

    @property
    def stalled_s(self) -> float:
        """Seconds the computation waited for copies."""
        return self.out.stalled_s + self.back.stalled_s

    @property
    def stalls(self) -> int:
        """How often the computation waited."""
        return self.out.stalls + self.back.stalls

    @property
    def hidden_share(self) -> float:
        """The share of all copying that the computation did not wait for, from 0 to 1."""
        return _hidden(self.stalled_s, self.out_busy_s + self.in_busy_s)

    def per_step(self, total: float) -> float:
        """A total of this object, divided by its steps; 0 when there was none."""
        return total / self.steps if self.steps else 0.0


def _hidden(stalled_s: float, busy_s: float) -> float:
    return min(1.0, max(0.0, 1.0 - stalled_s / busy_s)) if busy_s > 0 else 1.0
