"""The last forward and backward of a recorded step, and what stands when it begins.

An optimizer that steps in backward does so in the last pass, where a step takes the most: gradients
of earlier micro-batches stand then, or what a first pass found out about them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from memfit.measure.allocations import Event, mark
from memfit.measure.memory import storages_of
from memfit.workload import Workload

PASS = "pass"  # the mark where a forward begins
_GRADIENT = "gradient"


class Standing(NamedTuple):
    """Memory that is there when the last pass begins, and all through it."""

    bytes: int
    category: str


def mark_pass(workload: Workload) -> None:
    """Mark that a forward begins, and the gradients that are there."""
    mark(PASS)
    for parameter in workload.model.parameters():
        for storage in [] if parameter.grad is None else storages_of(parameter.grad):
            mark(f"{_GRADIENT} {storage.data_ptr()}")


def last_pass(events: Sequence[Event]) -> tuple[Sequence[Event], list[Standing]]:
    """The events of the last pass, and what was made before and is there still."""
    begins = [i for i, event in enumerate(events) if event.kind == "mark" and event.label == PASS]
    first = begins[-1] if begins else 0
    live = _alive_after(events[:first])
    gradients = {
        int(event.label.removeprefix(_GRADIENT))
        for event in events[first:]
        if event.kind == "mark" and event.label.startswith(_GRADIENT)
    }
    standing = [
        Standing(size, "gradients" if address in gradients else "temporaries")
        for address, size in live.items()
    ]
    return events[first:], standing


def _alive_after(events: Iterable[Event]) -> dict[int, int]:
    """Addresses and bytes of what was allocated and not freed."""
    live: dict[int, int] = {}
    for event in events:
        if event.kind == "alloc":
            live[event.address] = event.bytes
        elif event.kind == "free":
            live.pop(event.address, None)
    return live
