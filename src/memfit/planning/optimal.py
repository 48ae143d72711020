"""The fastest plan under a budget, by mixed-integer programming (HiGHS through scipy), or by the
table of a chain (`chain`) where many acts are about calls that form one.

Minimise the seconds that recompute and waiting for copies add (to the device, or to a host that
cannot keep up) so that memory stays under the budget at every position. Rows are added where the
simulator finds the budget broken, so the program stays small; what it proves about the smaller
program (its lower bound) holds for the full one. Limits: runs are at most `longest_run` calls long,
and times of calls add up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.optimize import Bounds, LinearConstraint
from scipy.sparse import csr_array

from memfit.planning.acts import Act, Pick, calls_of, covered, without_points
from memfit.planning.chain import Chain
from memfit.planning.lanes import Lanes
from memfit.planning.rows import Holders, MemoryRows, Row
from memfit.planning.simulate import Simulator
from memfit.planning.solver import solve_milp

# A lower peak at equal time is better: the whole budget weighs as much as this share of the time.
PEAK_WEIGHT = 1e-3
MAX_ROUNDS = 60
# The solver takes a row for met when it is broken by this share of the peak.
TOLERANCE = 1e-5
SHORT_WAIT = 1e-3  # of the step: waiting less for copies is not worth another try
LESS_TRUST = 0.75  # of the lanes' bytes per second
MAX_CUTS = 20
EXACT_ACTS = 150  # so many acts the solver settles in next to no time

May = Callable[[Act], bool]  # whether a plan may contain an act


def any_act(act: Act) -> bool:
    """Every act may be chosen."""
    return True


@dataclass(frozen=True)
class Solution:
    """Chosen acts, the bound the solver proved, and whether it was stopped before the end."""

    acts: tuple[Act, ...]
    lower_bound_s: float  # seconds of recompute that no plan can go under
    stopped: bool = False


def longest_run(simulator: Simulator) -> int:
    """How many calls one run may hold: a few more than the square root of all, where they pay."""
    return min(16, 4 + 2 * math.isqrt(len(simulator.graph.calls)))


def fastest(
    simulator: Simulator,
    budget: int,
    *,
    time_limit_s: float = 10.0,
    host_bytes: int | None = None,
    may: May = any_act,
) -> Solution | None:
    """The fewest seconds that keep the step within `budget`; None when nothing does.

    At most `host_bytes` may wait on the host. What is proven holds for the acts that `may` be
    chosen. Bytes of the program flow, real copies go piece by piece: where these make the step
    wait, it is solved again with less trust in the lanes.
    """
    program = _program(simulator)
    deadline = time.process_time() + time_limit_s
    short_s = SHORT_WAIT * simulator.profile.step_s
    first = program.solve(budget, time_limit_s, host_bytes, may=may)
    if first is None or simulator.traffic(first.acts).stall_s <= short_s:
        return first
    left_s = deadline - time.process_time()
    if left_s <= 0.5:
        return first
    again = program.solve(budget, left_s, host_bytes, LESS_TRUST, may)
    found = [first] if again is None else [first, again]
    best = min(found, key=lambda solution: simulator.step_seconds(solution.acts))
    return replace(best, lower_bound_s=first.lower_bound_s, stopped=first.stopped)


def smallest(
    simulator: Simulator,
    *,
    time_limit_s: float = 5.0,
    host_bytes: int | None = None,
    may: May = any_act,
) -> Solution | None:
    """The plan with the lowest peak; among those, one that recomputes and moves little.

    None when the time was not enough to find any.
    """
    return _program(simulator).solve(None, time_limit_s, host_bytes, may=may)


def is_quick(simulator: Simulator) -> bool:
    """Whether another budget takes next to no time, so that many can be tried."""
    return _program(simulator).is_quick


def candidates(simulator: Simulator) -> Sequence[Act]:
    """The acts that a plan is made of."""
    return _program(simulator).acts


def _gap(acts: int) -> float:
    """How near to the bound is near enough, of the seconds added: exact where that is quick."""
    return 1e-4 if acts <= EXACT_ACTS else 1e-2 if acts <= 600 else 3e-2


@lru_cache(maxsize=4)
def _program(simulator: Simulator) -> _Program:
    """One program per step: rows found for one budget hold for the next."""
    return _Program(simulator)


class _Program:
    """Columns: acts, counts of recomputed calls, sets of holders, the seconds added, the peak.

    Calls that are alike cost the same, so what matters is how many of them are recomputed: a whole
    number per kind lets the solver settle that first and not try every choice of which.
    """

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        runs = simulator.graph.runs(longest_run(simulator)) if simulator.recompute else []
        self.acts: list[Act] = [*runs, *simulator.picks(), *simulator.sends()]
        self.rows = MemoryRows(simulator, self.acts)
        # What an act costs is the sum over its parts: calls recomputed whole, or its variant.
        parts = [self._parts(act) for act in self.acts]
        costs = {part: self._cost(part) for act in parts for part in act}
        self.kinds = sorted(set(costs.values()))
        self.members = np.zeros((len(self.kinds), len(self.acts)))
        for number, of_act in enumerate(parts):
            for part in of_act:
                self.members[self.kinds.index(costs[part]), number] += 1
        everything: list[Act] = [(c, c) for c in range(len(simulator.graph.calls))]
        self.total_s = max(simulator.extra_seconds(everything), 1e-9)
        self.scale = max(simulator.peak_bytes([]), 1)
        self.lanes = Lanes(simulator, self.acts, self.scale, self.total_s)
        self.holders: dict[Holders, int] = {}
        self.memory: list[Row] = []
        self._positions: set[int] = set()
        self._cuts: list[frozenset[Act]] = []  # choices that break the budget by next to nothing
        self._host_bytes: int | None = None
        self._lane_share = 1.0
        self._may: May = any_act
        self._chain: Chain | None = None
        self._chained = 0  # rows that the chain has
        self._seed_rows()

    def _parts(self, act: Act) -> list[Act]:
        return [(c, c) for c in calls_of(act)] if isinstance(act, tuple) else [act]

    def _cost(self, part: Act) -> tuple[float, float]:
        return self.simulator.seconds_of(part), self.simulator.host_seconds_of(part)

    def solve(
        self,
        budget: int | None,
        time_limit_s: float,
        host_bytes: int | None = None,
        lane_share: float = 1.0,
        may: May = any_act,
    ) -> Solution | None:
        """Solve, simulate, add the rows that were broken, until none is."""
        self._host_bytes, self._lane_share, self._may = host_bytes, lane_share, may
        deadline = time.process_time() + time_limit_s
        best: tuple[Act, ...] | None = None
        bound_s = 0.0
        self._cuts = []
        asked = budget
        for tried in range(MAX_ROUNDS):
            left = deadline - time.process_time()
            if tried and left <= 0:
                break
            answer = self._answer(asked, max(left, 0.5))
            if answer is None:
                return None if best is None else Solution(best, bound_s, stopped=True)
            acts, proven_s = answer
            acts = self.simulator.scheduled(acts, budget)
            if asked == budget:  # what is proven for less than the budget is no bound
                bound_s = proven_s
            peak = self.simulator.peak_bytes(acts)
            limit = self._promised(acts) if budget is None else budget
            if peak <= limit:
                return Solution(acts, bound_s)
            if budget is None:
                if best is None or peak < self.simulator.peak_bytes(best):
                    best = acts
            broken = self.simulator.over(acts, limit)
            fresh = [p for p in broken if p not in self._positions]
            if budget is None and not fresh:
                return None if best is None else Solution(best, bound_s, stopped=True)
            if budget is not None and not fresh:
                # Over by less than the solver sees: rule out this choice, later all like it.
                self._cuts.append(frozenset(map(without_points, acts)))
                if len(self._cuts) > MAX_CUTS:
                    asked = budget - int(TOLERANCE * self.scale) - 1
            for position in fresh:
                self._add(position)
        return None if best is None else Solution(best, bound_s, stopped=True)

    def _seed_rows(self) -> None:
        """Rows that are broken first: the worst of keeping all, of all replays, of each alone."""
        sim = self.simulator
        singles: list[Act] = [a for a in self.acts if isinstance(a, tuple) and a[0] == a[1]]
        leanest = {p.call: p for p in self.acts if isinstance(p, Pick)}
        for acts in ([], singles, list(leanest.values())):
            peak = sim.peak_bytes(acts)
            for position in sim.over(acts, int(0.9 * peak))[:40]:
                self._add(position)
        self.memory += self.rows.insides()

    def _add(self, position: int) -> None:
        if position not in self._positions:
            self._positions.add(position)
            self.memory.append(self.rows.at(position))

    def _promised(self, acts: Sequence[Act]) -> int:
        """The highest row of the program for these acts."""
        plain = {without_points(act) for act in acts}
        chosen = np.array([act in plain for act in self.acts], dtype=bool)
        kept = set(range(len(self.simulator.graph.calls))) - covered(list(acts))
        highest = 0
        for row in self.memory:
            total = row.constant + int(row.coefficients[chosen].sum())
            for holders, size in row.shared.items():
                there = any(
                    (h.kept and h.call in kept) or any(chosen[r] for r in h.acts) for h in holders
                )
                total += size if there else 0
            highest = max(highest, total)
        return highest

    @property
    def is_quick(self) -> bool:
        """Whether a table is filled instead of branching."""
        return self._as_chain() is not None

    def _answer(
        self, budget: int | None, time_limit_s: float
    ) -> tuple[tuple[Act, ...], float] | None:
        """Acts that meet the rows so far, and what is proven of them; None when none are found."""
        chain = self._as_chain()
        if chain is None:
            return self._solve_once(budget, time_limit_s)
        barred = {number for number, act in enumerate(self.acts) if not self._may(act)}
        if budget is None:
            return chain.fastest(chain.lowest_budget(barred), barred)
        return chain.fastest(budget, barred)

    def _as_chain(self) -> Chain | None:
        """The program as a chain of calls, where it is one and too large to be solved exactly."""
        if len(self.acts) <= EXACT_ACTS or self.lanes.aways or self._cuts:
            return None
        sim = self.simulator
        if self._chain is None:
            self._chain = Chain(
                len(sim.graph.calls),
                self.acts,
                [sim.seconds_of(act) for act in self.acts],
                [sim.host_seconds_of(act) for act in self.acts],
                sim.profile.host_slack_s,
                self.rows.at(sim.graph.model_end),
                negligible_bytes=int(TOLERANCE * self.scale),
            )
        for row in self.memory[self._chained :]:
            self._chain.add(row)
        self._chained = len(self.memory)
        return self._chain if self._chain.unbroken else None

    def _solve_once(
        self, budget: int | None, time_limit_s: float
    ) -> tuple[tuple[Act, ...], float] | None:
        for row in self.memory:
            for holders in row.shared:
                self.holders.setdefault(holders, len(self.holders))
        acts, counts = len(self.acts), len(self.acts) + len(self.kinds)
        transit = counts + len(self.holders)
        columns = transit + self.lanes.columns + 2
        seconds, peak = columns - 2, columns - 1
        matrix, upper = self._constraints(columns)
        cost = np.zeros(columns)
        cost[seconds] = PEAK_WEIGHT if budget is None else 1.0
        cost[peak] = 1.0 if budget is None else PEAK_WEIGHT
        high = np.ones(columns)
        high[[number for number, act in enumerate(self.acts) if not self._may(act)]] = 0.0
        high[acts:counts] = np.inf
        high[transit : transit + self.lanes.columns] = np.inf
        high[[transit + column for column in self.lanes.nothing]] = 0.0
        high[seconds] = np.inf
        high[peak] = np.inf if budget is None else budget / self.scale
        integral = np.zeros(columns)
        integral[:counts] = 1
        result = solve_milp(
            cost,
            integrality=integral,
            bounds=Bounds(np.zeros(columns), high),
            constraints=LinearConstraint(matrix, -np.inf, upper),
            options={"time_limit": time_limit_s, "mip_rel_gap": _gap(acts)},
        )
        if result.x is None:
            return None
        chosen = tuple(act for act, x in zip(self.acts, result.x[:acts], strict=True) if x > 0.5)
        bound = getattr(result, "mip_dual_bound", None)
        if bound is None or budget is None:
            return chosen, 0.0
        most_for_peak = PEAK_WEIGHT * budget / self.scale
        bound_s = (float(bound) - most_for_peak) * self.total_s
        # The program adds drag up without end. But copies that last longer than the step make it
        # wait for the rest: it overrates a plan by the drag of its own cost at most.
        copy = self.simulator.copy
        drag = copy.drag if copy is not None and copy.overlap else 0.0
        return chosen, max(0.0, bound_s / (1 + drag))

    def _constraints(self, columns: int) -> tuple[csr_array, np.ndarray]:
        """Memory rows below the peak column; held blocks; every call in at most one act."""
        acts, offset = len(self.acts), len(self.acts) + len(self.kinds)
        transit = offset + len(self.holders)
        seconds, peak = columns - 2, columns - 1
        entries: list[tuple[int, int, float]] = []
        upper: list[float] = []
        for kind, members in enumerate(self.members):
            for act in np.flatnonzero(members):
                entries.append((len(upper), int(act), float(members[act])))
            entries.append((len(upper), acts + kind, -1.0))
            upper.append(0.0)
        for who, slack_s in enumerate((0.0, self.simulator.profile.host_slack_s)):
            for kind, cost in enumerate(self.kinds):
                entries.append((len(upper), acts + kind, cost[who] / self.total_s))
            if not who:  # while the device waits for copies, the host works on
                repeats = float(self.simulator.profile.passes)
                entries.extend((len(upper), transit + wait, repeats) for wait in self.lanes.waits)
            entries.append((len(upper), seconds, -1.0))
            upper.append(slack_s / self.total_s)
        for row in self.memory:
            line = len(upper)
            for act in np.flatnonzero(row.coefficients):
                entries.append((line, int(act), float(row.coefficients[act]) / self.scale))
            for holders, size in row.shared.items():
                entries.append((line, offset + self.holders[holders], size / self.scale))
            if (column := self.lanes.column_at(row.position)) is not None:
                entries.append((line, transit + column, 1.0))
            entries.append((line, peak, -1.0))
            upper.append(-row.constant / self.scale)
        for coefficients, bound in self.lanes.rows(transit, self._lane_share):
            entries.extend((len(upper), column, value) for column, value in coefficients.items())
            upper.append(bound)
        if self._host_bytes is not None and self.lanes.aways:
            for number, taken in self.lanes.host_bytes().items():
                entries.append((len(upper), number, taken / self.scale))
            upper.append(self._host_bytes / self.scale)
        for holders, number in self.holders.items():
            for clique in holders:
                line = len(upper)
                entries.append((line, offset + number, -1.0))
                if clique.kept:  # held >= 1 - (acts with the call that do not hold the block)
                    others = set(self.rows.containing[clique.call]) - clique.acts
                    entries.extend((line, other, -1.0) for other in sorted(others))
                    upper.append(-1.0)
                else:  # held >= the sum of the acts that hold it
                    entries.extend((line, holder, 1.0) for holder in sorted(clique.acts))
                    upper.append(0.0)
        for containing in self.rows.containing:
            if containing:
                entries.extend((len(upper), member, 1.0) for member in containing)
                upper.append(1.0)
        for cut in self._cuts:
            signs = [1.0 if act in cut else -1.0 for act in self.acts]
            entries.extend((len(upper), number, sign) for number, sign in enumerate(signs))
            upper.append(len(cut) - 1.0)
        table = np.array(entries, dtype=float).reshape(-1, 3)
        places = (table[:, 0].astype(int), table[:, 1].astype(int))
        matrix = csr_array((table[:, 2], places), shape=(len(upper), columns))
        return matrix, np.array(upper)
