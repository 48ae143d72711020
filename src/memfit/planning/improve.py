"""A choice made faster by one change after the other, each as the simulator says.

Copies make the program hard, and it reckons with bytes that flow. Here an act is dropped, or
another one takes the place of all that is decided about its calls, wherever that is faster and
still fits. Those that promise most are tried first. What is found need not be the best there is: no
single change makes it faster, or time was up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from memfit.planning.acts import Act, calls_of, without_points
from memfit.planning.simulate import Simulator

WORTH = 1e-4  # of the step's time: less is not worth a change

MAX_REFUSED = 12  # changes in a row that are in the room, and do not fit

Acts = tuple[Act, ...]
Fits = Callable[[Sequence[Act]], bool]


def improved(
    simulator: Simulator,
    acts: Sequence[Act],
    candidates: Sequence[Act],
    fits: Fits,
    rooms: Sequence[int],
    time_limit_s: float,
) -> Acts:
    """`acts`, which fit, after all changes by `candidates` that make the step faster and fit.

    `rooms` are peaks of live bytes that may fit, the likely ones first. The limit is on time of the
    processor.
    """
    best = tuple(acts)
    best_s = simulator.step_seconds(best)
    least_s = WORTH * simulator.profile.step_s
    deadline = time.process_time() + time_limit_s  # other processes may be busy
    at_most_s = costs(simulator, candidates)
    waiting = list(rooms)
    while waiting:
        room, refused = waiting.pop(0), 0
        for change in changes(simulator, best, at_most_s):
            if change.won_s <= 0:
                break
            if time.process_time() > deadline:
                return best
            changed = change.of(best)
            if changed is None or simulator.peak_bytes(changed) > room:
                continue
            found = simulator.scheduled(changed, room)
            seconds = simulator.step_seconds(found)
            if seconds > best_s - least_s or simulator.peak_bytes(found) > room:
                continue
            if fits(found):
                best, best_s, refused = found, seconds, 0
                waiting = list(rooms)  # what did not help before may help now
            elif (refused := refused + 1) >= MAX_REFUSED:
                break
    return best


class Change(NamedTuple):
    """`new` takes the place of `old` acts: that wins `won_s` at most, or costs them if below 0."""

    won_s: float
    new: Act | None
    old: frozenset[Act]

    def of(self, acts: Acts) -> Acts | None:
        """The acts after the change, without points; None where the old ones are gone already."""
        tight = [without_points(act) for act in acts]
        if not self.old <= set(tight):
            return None
        left = [act for act in tight if act not in self.old]
        calls = {call for act in left for call in calls_of(act)}
        added = [] if self.new is None else [self.new]
        if any(call in calls for act in added for call in calls_of(act)):
            return None
        return tuple(sorted([*left, *added], key=lambda act: calls_of(act)[0]))


def costs(simulator: Simulator, acts: Sequence[Act]) -> dict[Act, float]:
    """The seconds that each of the acts adds at most."""
    return {act: _seconds(simulator, act) for act in acts}


def changes(simulator: Simulator, acts: Acts, at_most_s: Mapping[Act, float]) -> list[Change]:
    """All single changes by acts that cost so much at most, those that promise most first."""
    tight = [without_points(act) for act in acts]
    spent = {act: _seconds(simulator, act) for act in tight}
    of_call = {call: act for act in tight for call in calls_of(act)}
    found = [Change(spent[act], None, frozenset([act])) for act in tight]
    for act, act_s in at_most_s.items():
        old = frozenset(of_call[call] for call in calls_of(act) if call in of_call)
        change = Change(sum(spent[o] for o in old) - act_s, act, old)
        found += [] if act in spent else [change]
    return sorted(found, key=lambda change: -change.won_s)


def _seconds(simulator: Simulator, act: Act) -> float:
    """What an act adds at most: nothing may hide its copies."""
    away = None if isinstance(act, tuple) else simulator.effect(act).away
    copies_s = 0.0
    if away is not None and simulator.copies.overlap:
        size = away.own_bytes + int(simulator.bytes[away.blocks].sum())
        copies = simulator.copies
        copies_s = copies.out_seconds(size, away.tensors) + copies.in_seconds(size, away.tensors)
    return simulator.seconds_of(act) + simulator.profile.passes * copies_s
