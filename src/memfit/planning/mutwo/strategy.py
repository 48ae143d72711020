"""The strategy `mutwo`: Algorithm B of mu-TWO on the tensors of a step, and its decisions as acts.

The algorithm reckons with operators and single tensors. The step runs by calls: what a call
recomputes it makes once, however many of its tensors need it, and what it moves comes back
together, from the prompt of the first of them. So bytes and seconds of the plan are the
simulator's, not the algorithm's. Limit: like the paper, it takes no account of the way out; where
that is the slower one, more waits for copies than the decisions reckoned with.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from memfit.planning.acts import AT_ONCE, Act, Pick, without_points
from memfit.planning.mutwo.algorithm import decide
from memfit.planning.mutwo.gather import Gathered, Segment, gather, segments_of
from memfit.planning.mutwo.step import RECOMPUTE, RETAINED, Decision, Usage, merged
from memfit.planning.request import Choice, Request
from memfit.planning.simulate import Simulator


def choose_mutwo(simulator: Simulator, request: Request) -> Choice | None:
    """Swap or recompute one tensor after the other until the budget is met (mu-TWO).

    Where it cannot be met, all that can be is swapped or recomputed. Without captured segments
    nothing can be: a choice that nobody set a budget for says so.
    """
    idle = why_idle(simulator)
    if idle is not None:
        kept = f"{idle}: everything is kept; another --executor may capture them"
        note = kept if request.budget is None else None
        return Choice((), note=note)
    segments = segments_of(simulator)
    gathered = gather(simulator, segments)
    # Menus keep what they are offered: what is only tried goes to a simulator of its own.
    own = Simulator(simulator.profile, simulator.min_tensor_bytes, simulator.techniques)
    trial = _Trial(own, gathered, segments)
    decisions = decide(
        gathered.step,
        request.budget,
        lambda taken: trial.usage(taken, request),
        host_bytes=request.host_bytes,
    )
    taken = [d for d in decisions if d.choice != RETAINED]
    acts = _Trial(simulator, gathered, segments).acts(taken, request)
    return Choice(_with_less_waiting(simulator, acts, request.budget))


def why_idle(simulator: Simulator) -> str | None:
    """Why the algorithm has nothing to decide about in this step; None where it has."""
    if any(call.graph >= 0 and call.need >= 0 for call in simulator.graph.calls):
        return None
    by_module = simulator.profile.executor == "module"
    why = ", as executor 'module' runs them whole" if by_module else ""
    return f"'mutwo' decides inside captured segments, and this profile has none{why}"


def _with_less_waiting(
    simulator: Simulator, acts: tuple[Act, ...], budget: int | None
) -> tuple[Act, ...]:
    """The acts with the points the simulator would choose, if less waits for those.

    The prompts were set before the last decision made room, and for tensors, not for calls.
    Without a budget, the simulator has room for two calls' memory in transit.
    """
    if budget is None:
        largest = max((size for _, size, _ in simulator.loads(acts)), default=0)
        lowest = simulator.peak_bytes([without_points(act) for act in acts])
        return simulator.scheduled(acts, lowest + 2 * largest)
    others = simulator.scheduled(acts, budget)
    holds = simulator.peak_bytes(others) <= max(budget, simulator.peak_bytes(acts))
    less = simulator.extra_seconds(others) < simulator.extra_seconds(acts)
    return others if holds and less else acts


class _Trial:
    """Decisions as acts of a simulator, and the memory these take."""

    def __init__(
        self, simulator: Simulator, gathered: Gathered, segments: Sequence[Segment]
    ) -> None:
        self.simulator, self.gathered, self.segments = simulator, gathered, segments
        self._needs = [simulator.graph.calls[c].need for c in gathered.order]
        self._numbers: dict[tuple[int, frozenset[int], frozenset[int]], int] = {}

    def usage(self, decisions: Sequence[Decision], request: Request) -> Usage:
        """The peak, and the operators of the backward over the budget: all of a call's at once."""
        if request.budget is None:
            return Usage(0)  # nobody asks
        highest = self.simulator.highest(self.acts(decisions, request))
        peak_bytes = int(highest.max())
        if not self._needs:
            return Usage(peak_bytes)
        backward = highest[: max(self.simulator.graph.backward_end, self._needs[-1] + 1)]
        most = np.maximum.reduceat(backward, self._needs)
        starts = self.gathered.starts
        over = np.flatnonzero(most > request.budget).tolist()
        return Usage(peak_bytes, merged((starts[i], starts[i + 1] - 1) for i in over))

    def acts(self, decisions: Sequence[Decision], request: Request) -> tuple[Act, ...]:
        """One pick for every call that the decisions change.

        Copies out end when the simulator says; copies back start at the first of their prompts.
        """
        left_out: dict[int, set[int]] = {}
        moved: dict[int, set[int]] = {}
        prompts: dict[int, int] = {}
        for decision in decisions:
            into = left_out if decision.choice == RECOMPUTE else moved
            for call, node in self.gathered.places[decision.candidate]:
                into.setdefault(call, set()).add(node)
                if decision.prompt is not None:
                    prompts[call] = min(prompts.get(call, decision.prompt), decision.prompt)
        picks: list[Act] = []
        for call in sorted({*left_out, *moved}):
            out, away = frozenset(left_out.get(call, ())), frozenset(moved.get(call, ()))
            picks.append(Pick(call, self._number(call, out, away)))
        if not moved:
            return tuple(picks)
        scheduled = self.simulator.scheduled(picks, request.budget)
        return tuple(self._prompted(act, prompts) for act in scheduled)

    def _prompted(self, act: Act, prompts: dict[int, int]) -> Act:
        """The act with its copy back where the algorithm put it."""
        if not isinstance(act, Pick) or act.call not in prompts:
            return act
        place = bisect_right(self.gathered.starts, prompts[act.call]) - 1
        call = self.gathered.order[place]
        return replace(act, prefetch=AT_ONCE if call == act.call else call)

    def _number(self, call: int, left_out: frozenset[int], moved: frozenset[int]) -> int:
        """The variant of a call's menu that leaves out and moves these nodes."""
        graph = self.simulator.graph.calls[call].graph
        key = (graph, left_out, moved)
        if key not in self._numbers:
            saved = self.segments[graph].saved(left_out)
            self._numbers[key] = self.simulator.offer(graph, saved, moved & saved)
        return self._numbers[key]
