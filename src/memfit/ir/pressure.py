"""What a safety valve did."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.ir.swap import Traffic


@dataclass(frozen=True)
class PressureStatistics:
    """Totals of a valve since it was made.

    `swaps` says how often the device memory of a saved tensor was let go, `retrievals` how often
    it was allocated and filled again. `highest_bytes` is the most memory in use that the valve saw
    when it looked, `host_highest_bytes` the most that lay in host memory.
    """

    swaps: int
    retrievals: int
    out: Traffic
    back: Traffic
    highest_bytes: int
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
    def waited_s(self) -> float:
        """Seconds the computation waited for copies."""
        return self.out.stalled_s + self.back.stalled_s
