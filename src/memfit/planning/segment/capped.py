"""The least bytes that a cap on seconds of recompute allows, as a 0/1 program (HiGHS).

Where `mincut` finds the corners of the curve of bytes against seconds, this finds the points
between them. A cap on bytes would find points, too, but filled up to it with tensors of next to no
bytes; what a cap on seconds finds are the corners of the steps, where one byte less costs most.

Limits: of a segment of more than `EXACT_NODES` an answer may be `REL_GAP` off the best, and so may
one whose search was stopped.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from scipy.optimize import Bounds, LinearConstraint
from scipy.sparse import csr_array

from memfit.planning.segment.mincut import Choices, Point
from memfit.planning.solver import solve_milp

# Larger programs may be this share off the best; seconds that are alike make the last bit long.
EXACT_NODES = 150
REL_GAP = 0.01
# Ends a hopeless search at the same place on every machine, as the time limit would not.
MAX_BRANCHES = 2000
# Of two answers with the same bytes the one with fewer seconds: all seconds weigh as much as this
# share of all bytes.
SECONDS_WEIGHT = 1e-6
# The solver's tolerances are absolute: at a scale of 1 it stops early, and loses answers that fill
# the cap to the last bit.
SCALE = 1e4


class CappedProgram:
    """Least bytes with at most so many seconds: a column per node to save and to run again."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.save: dict[int, int] = {}
        self.run: dict[int, int] = {}
        self.columns = 0
        for node in choices.nodes:
            if choices.can_save[node]:
                self.save[node] = self._column()
            if choices.can_run[node]:
                self.run[node] = self._column()
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        bytes_at = self._storages()
        self._needs()
        self.bytes = np.zeros(self.columns)
        self.seconds = np.zeros(self.columns)
        for column, size in bytes_at.items():
            self.bytes[column] = size
        for node, column in self.run.items():
            self.bytes[column] = choices.state_bytes(node)
            self.seconds[column] = choices.graph.again_seconds[node]
        # What is run again follows from what is saved, and nothing of no bytes is half saved.
        self.integral = np.zeros(self.columns)
        self.integral[[c for n, c in self.save.items() if choices.bytes_of(n)]] = 1

    def _column(self) -> int:
        self.columns += 1
        return self.columns - 1

    def _row(self, positive: Iterable[int], negative: Iterable[int], low: float) -> None:
        row = len(self.low)
        self.entries.extend((row, column, 1.0) for column in positive)
        self.entries.extend((row, column, -1.0) for column in negative)
        self.low.append(low)

    def _storages(self) -> dict[int, int]:
        """Bytes by column: that of the one node that saves a storage, or one of the storage's."""
        graph, savers = self.choices.graph, dict[int, list[int]]()
        for node in self.save:
            if self.choices.bytes_of(node):
                for storage in graph.nodes[node].storages:
                    savers.setdefault(storage, []).append(node)
        bytes_at: dict[int, int] = {}
        for storage, nodes in savers.items():
            column = self.save[nodes[0]] if len(nodes) == 1 else self._column()
            bytes_at[column] = bytes_at.get(column, 0) + graph.storages[storage].bytes
            for node in nodes if len(nodes) > 1 else ():
                self._row([column], [self.save[node]], 0.0)
        return bytes_at

    def _needs(self) -> None:
        """Rows: what is needed is there, and so are the sources of what is run again."""
        for node in self.choices.needed:
            self._row(self._there(node), [], 1.0)
        for node, column in self.run.items():
            for source in dict.fromkeys(self.choices.sources[node]):
                self._row(self._there(source), [column], 0.0)

    def _there(self, node: int) -> list[int]:
        return [columns[node] for columns in (self.save, self.run) if node in columns]

    def solve(self, cap_s: float, time_limit_s: float) -> Point | None:
        """The point with the least bytes in at most `cap_s` seconds; None when time is up."""
        if time_limit_s <= 0:
            return None
        table = np.array(self.entries).reshape(-1, 3)
        places = (table[:, 0].astype(int), table[:, 1].astype(int))
        needs = csr_array((table[:, 2], places), shape=(len(self.low), self.columns))
        seconds, held = self.seconds / self.seconds.sum(), self.bytes / self.bytes.sum()
        exact = len(self.choices.nodes) <= EXACT_NODES
        share = SCALE / cap_s
        result = solve_milp(
            SCALE * (held + SECONDS_WEIGHT * seconds),
            integrality=self.integral,
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(needs, self.low, np.inf),
                LinearConstraint(share * self.seconds[None, :], -np.inf, share * cap_s),
            ],
            options={
                "time_limit": time_limit_s,
                "node_limit": MAX_BRANCHES,
                "mip_rel_gap": 0.0 if exact else REL_GAP,
            },
        )
        if result.x is None:
            return None
        return self.choices.point(n for n, column in self.save.items() if result.x[column] > 0.5)
