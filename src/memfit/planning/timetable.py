"""When each call's forward and backward and each copy runs: the lanes of `copies`, written down."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.planning.acts import Act, calls_of
from memfit.planning.copies import Stretch, Timetable
from memfit.planning.simulate import Simulator


def timetable(simulator: Simulator, acts: Sequence[Act]) -> Timetable:
    """The stretches of work and of copies under `acts`, without what lies between the calls."""
    loads = simulator.loads(acts)
    extra_s = simulator.added_seconds(acts)
    copies = simulator.copies
    if copies.overlap or not loads:
        table = Timetable()
        copies.traffic(loads, extra_s, table)
        return table
    return _one_after_the_other(simulator, acts)


def _one_after_the_other(simulator: Simulator, acts: Sequence[Act]) -> Timetable:
    """The same where nothing runs beside a copy: it follows its forward, and its backward it.

    There copying is part of the seconds that an act adds.
    """
    copies, table = simulator.copies, Timetable()
    loads = {away.call: (away.tensors, out, back) for away, out, back in simulator.loads(acts)}
    extra_s = simulator.added_seconds(acts)
    for act in acts:
        extra_s[calls_of(act)[-1]] -= simulator.drag_seconds(act) / simulator.profile.passes
    now = 0.0
    for call, forward_s in enumerate(copies.forward_s):
        table.forward.append(Stretch(call, now, now := now + forward_s))
        if call in loads:
            tensors, out, _ = loads[call]
            done = now + copies.out_seconds(out, tensors)
            table.out.append(Stretch(call, now, now := done, out))
    for call in copies.order:
        if call in loads:
            tensors, _, back = loads[call]
            done = now + copies.in_seconds(back, tensors)
            table.back.append(Stretch(call, now, now := done, back))
        work_s = copies.backward_s[call] + max(extra_s.get(call, 0.0), 0.0)
        table.backward.append(Stretch(call, now, now := now + work_s))
    return table
