"""How much memory is in use, and how much there may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memfit.errors import UsageError
from memfit.measure.memory import cuda_capacity

_LOOK_SHARE = 0.005  # of the capacity: a look costs some ten microseconds on CUDA
_ROOM = 3  # times the largest saved tensor: room for what comes before the next look
_AWAKE_AT = 0.75  # of the high mark: from here on every saved tensor is looked at
_QUIET_AT = 0.65  # of the high mark: a step that stays below leaves the next one alone


class Gauge(Protocol):
    """Bytes in use on a device.

    `look_every` bytes saved or brought back it is worth a look. `counts` is whether it must be
    told of every saved tensor that comes and goes.
    """

    look_every: int
    counts: bool

    def allocated(self) -> int: ...
    def added(self, size: int) -> None: ...
    def removed(self, size: int) -> None: ...


class CudaGauge:
    """Reads the allocator: everything the process has allocated, not what it keeps in reserve."""

    counts = False

    def __init__(self, device: torch.device, capacity: int) -> None:
        self._device = device
        self.look_every = int(capacity * _LOOK_SHARE)

    def allocated(self) -> int:
        # memory_allocated() would flatten and sort some 200 numbers to find this one.
        numbers: Any = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(numbers["allocated_bytes"]["all"]["current"])

    def added(self, size: int) -> None:
        pass

    def removed(self, size: int) -> None:
        pass


class CountingGauge:
    """Counts the saved tensors it is told of, where no allocator can be asked."""

    counts = True
    look_every = 0

    def __init__(self) -> None:
        self._bytes = 0

    def allocated(self) -> int:
        return self._bytes

    def added(self, size: int) -> None:
        self._bytes += size

    def removed(self, size: int) -> None:
        self._bytes -= size


@dataclass(frozen=True)
class Marks:
    """Bytes at which the valve acts. With `always` it does not ask how much is in use."""

    high: int
    low: int
    capacity: int
    always: bool

    @property
    def awake(self) -> int:
        """A valve that looks now and then looks at every saved tensor from here on."""
        return int(self.high * _AWAKE_AT)

    @property
    def quiet(self) -> int:
        """A step that stays below needs no more than a look now and then."""
        return int(self.high * _QUIET_AT)

    def ceiling(self, largest: int) -> int:
        """Above this, memory that is on its way out is waited for.

        Half of what lies above the high mark is left to copies under way, unless three tensors as
        large as the largest would not fit into the rest.
        """
        return max(self.low, min((self.high + self.capacity) // 2, self.capacity - _ROOM * largest))


def marks_for(
    device: torch.device, threshold: float, release_at: float, capacity: int | None
) -> Marks:
    """The marks of a device; UsageError where its capacity is needed but cannot be known."""
    if capacity is None:
        capacity = cuda_capacity(device) if device.type == "cuda" else 0
    if capacity == 0 and threshold > 0:
        raise no_capacity(device.type)
    return Marks(int(capacity * threshold), int(capacity * release_at), capacity, threshold == 0)


def no_capacity(kind: str) -> UsageError:
    """The refusal where nobody can say how much memory there is."""
    return UsageError(
        f"on a {kind} device memfit cannot know how much memory saved tensors may take",
        hint='say it, memfit.pressure(capacity="4GiB"), or swap everything: threshold=0',
    )


def gauge_for(device: torch.device, capacity: int) -> Gauge:
    """What reads the memory in use on a device."""
    return CudaGauge(device, capacity) if device.type == "cuda" else CountingGauge()
