"""Acts: what a plan does beside keeping everything, and what each act does to the step's memory.

A run recomputes consecutive segment calls whole, from what enters the first. A pick runs one call
by another variant of its menu: its own graphs keep less and recompute inside, and part of what they
keep may wait on the host. A send moves all that a call without a joint graph keeps to the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memfit.ir.swap import HOST_GRAIN

Run = tuple[int, int]
Ints = np.ndarray
AT_ONCE = -1


@dataclass(frozen=True, order=True)
class Pick:
    """Call `call` runs by the variant of this number in its menu.

    What the variant moves leaves the device's memory before the forward of call `release`, and
    begins to come back before the backward of call `prefetch`; the number of calls stands for the
    end of the model's forward. AT_ONCE: before the next forward; when it is needed.
    """

    call: int
    variant: int
    release: int = AT_ONCE
    prefetch: int = AT_ONCE


@dataclass(frozen=True, order=True)
class Send:
    """What call `call` keeps waits on the host; points as in Pick."""

    call: int
    release: int = AT_ONCE
    prefetch: int = AT_ONCE


Act = Run | Pick | Send


def calls_of(act: Act) -> range:
    """The calls an act decides about."""
    return range(act[0], act[1] + 1) if isinstance(act, tuple) else range(act.call, act.call + 1)


def covered(acts: tuple[Act, ...] | list[Act]) -> set[int]:
    """The calls that any of the acts decides about."""
    return {call for act in acts for call in calls_of(act)}


def without_points(act: Act) -> Act:
    """The act as it is chosen, before its copies are scheduled."""
    return act if isinstance(act, tuple) else replace(act, release=AT_ONCE, prefetch=AT_ONCE)


@dataclass(frozen=True)
class Away:
    """Memory that waits on the host: `own_bytes` of the call alone, and step `blocks`.

    It is gone from position `leaves` on and there again from `returns` on, which stand for the
    points `release` and `prefetch`; the blocks are let go at `releases`. `tensors` counts the
    copies each way, `moments` those of the call at which some are saved, or wanted back: a captured
    call saves everything when its forward ends and wants all of it when its backward begins.
    """

    call: int
    release: int
    prefetch: int
    own_bytes: int
    tensors: int
    moments: int
    blocks: Ints
    leaves: int
    returns: int
    releases: Ints

    @property
    def rounding_bytes(self) -> int:
        """What host memory for the tensors may take beyond their bytes."""
        return self.tensors * (HOST_GRAIN - 1)


@dataclass(frozen=True)
class Effect:
    """What an act does to memory.

    `held` blocks live until `held_until`; `standing` are (from, until, bytes) beside all blocks.
    At `need` the `blocks` are made anew and survive until `releases`. `inside` are moments within
    one position: (position, bytes above those of the position, what happens). `absent` blocks are
    never made.
    """

    need: int
    held: Ints
    held_until: Ints
    blocks: Ints
    releases: Ints
    survivor_bytes: int
    standing: tuple[tuple[int, int, int], ...]
    inside: tuple[tuple[int, int, str], ...]
    absent: Ints
    away: Away | None = None
