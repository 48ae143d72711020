"""Acts: what a plan does beside keeping everything, and what each act does to the step's memory.

A run recomputes consecutive segment calls whole, from what enters the first. A pick runs one call
by another variant of its menu: its own graphs keep less and recompute inside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Run = tuple[int, int]
Ints = np.ndarray


@dataclass(frozen=True, order=True)
class Pick:
    """Call `call` runs by the variant of this number in its menu."""

    call: int
    variant: int


Act = Run | Pick


def calls_of(act: Act) -> range:
    """The calls an act decides about."""
    return range(act.call, act.call + 1) if isinstance(act, Pick) else range(act[0], act[1] + 1)


def covered(acts: tuple[Act, ...] | list[Act]) -> set[int]:
    """The calls that any of the acts decides about."""
    return {call for act in acts for call in calls_of(act)}


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
    held_until: int
    blocks: Ints
    releases: Ints
    survivor_bytes: int
    standing: tuple[tuple[int, int, int], ...]
    inside: tuple[tuple[int, int, str], ...]
    absent: Ints
