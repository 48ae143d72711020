"""The memory of a step at one position, as a linear row over the runs a plan may choose.

Variables: one 0/1 per candidate run. A call is kept when no chosen run contains it, so the chosen
runs that contain one call exclude each other. A block that several calls may hold needs one more
variable: it is there when any of them holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from memfit.planning.simulate import Ints, Run, Simulator


@dataclass(frozen=True)
class Clique:
    """Choices that exclude each other: keeping `call` (if `kept`), or one of `runs`."""

    call: int
    kept: bool
    runs: frozenset[int]


Holders = frozenset[Clique]


@dataclass
class Row:
    """constant + coefficients . runs + sum of bytes over held blocks."""

    constant: int
    coefficients: Ints
    shared: dict[Holders, int]


class MemoryRows:
    """Builds rows for one step and one list of candidate runs."""

    def __init__(self, simulator: Simulator, runs: Sequence[Run]) -> None:
        self.simulator = simulator
        self.runs = list(runs)
        graph = simulator.graph
        self.containing: list[list[int]] = [[] for _ in graph.calls]
        for number, (first, last) in enumerate(self.runs):
            for call in range(first, last + 1):
                self.containing[call].append(number)
        arguments = {b for call in graph.calls for b in call.args}
        self._shared = np.zeros(len(graph.blocks), dtype=bool)
        for block in graph.blocks:
            holders = {h.call for h in block.holds}
            self._shared[block.id] = block.id in arguments or bool(holders - {block.call})
        self._collect()
        self.at = lru_cache(maxsize=None)(self._at)

    def _collect(self) -> None:
        """Lay out who may hold what, and when, in arrays."""
        sim, graph = self.simulator, self.simulator.graph
        replayed, held, spans = [], [], []
        for number, run in enumerate(self.runs):
            replay = sim.replay(run)
            if replay is None:
                continue
            enter = graph.calls[run[0]].enter
            spans.append((number, enter, replay.done, replay.state_bytes))
            for block, release in zip(replay.blocks, replay.releases, strict=True):
                replayed.append((number, block, replay.need, release))
            for call in graph.calls[run[0] : run[1] + 1]:
                first = call.index == run[0]
                for block in call.args if first else set(call.args) - set(call.linked):
                    held.append((number, block, call.index, replay.done))
        self._spans = np.array(spans, dtype=np.int64).reshape(-1, 4)
        self._replayed = np.array(replayed, dtype=np.int64).reshape(-1, 4)
        self._held = np.array(held, dtype=np.int64).reshape(-1, 4)

    def _at(self, position: int) -> Row:
        """The row of one position of the step."""
        sim, graph = self.simulator, self.simulator.graph
        born = sim.birth <= position
        flowing = born & (position < sim.death)
        constant = graph.static_bytes + int(sim.bytes[flowing].sum())
        coefficients = np.zeros(len(self.runs), dtype=np.int64)
        waiting = born & ~flowing

        active = waiting[sim.hold_block] & (position < sim.hold_release)
        private = active & ~self._shared[sim.hold_block]
        weights = sim.bytes[sim.hold_block[private]]
        per_call = np.bincount(
            sim.hold_call[private], weights=weights, minlength=len(graph.calls)
        ).astype(np.int64)
        for call in np.flatnonzero(per_call):
            constant += int(per_call[call])
            coefficients[self.containing[call]] -= per_call[call]

        number, enter, done, state = self._spans.T
        span = (enter <= position) & (position < done)
        np.add.at(coefficients, number[span], state[span])
        number, block, need, release = self._replayed.T
        again = (need <= position) & (position < release)
        np.add.at(coefficients, number[again], sim.bytes[block[again]])

        shared: dict[Holders, int] = {}
        for block_id, holders in self._holders(position, active, waiting).items():
            size = int(sim.bytes[block_id])
            if len(holders) > 1:
                shared[holders] = shared.get(holders, 0) + size
                continue
            (only,) = holders
            if only.kept:
                constant += size
                for run in self.containing[only.call]:
                    if run not in only.runs:
                        coefficients[run] -= size
            else:
                for run in only.runs:
                    coefficients[run] += size
        return Row(constant, coefficients, shared)

    def replays(self) -> list[Row]:
        """The worst moments inside replays: one row per position where replays begin.

        Runs whose replays begin together exclude each other, so they share a row.
        """
        extra: dict[int, dict[int, int]] = {}
        for number, run in enumerate(self.runs):
            replay = self.simulator.replay(run)
            if replay is not None:
                inside = replay.peak_bytes - replay.survivor_bytes
                extra.setdefault(replay.need, {})[number] = inside
        rows = []
        for need, inside_of in sorted(extra.items()):
            row = self.at(need)
            coefficients = row.coefficients.copy()
            for number, inside in inside_of.items():
                coefficients[number] += inside
            rows.append(Row(row.constant, coefficients, row.shared))
        return rows

    def _holders(self, position: int, active: Ints, waiting: Ints) -> dict[int, Holders]:
        """Who may hold each shared block that the running code has dropped."""
        sim = self.simulator
        by_block: dict[int, dict[int, tuple[bool, set[int]]]] = {}
        keeping = active & self._shared[sim.hold_block]
        for block, call in zip(sim.hold_block[keeping], sim.hold_call[keeping], strict=True):
            by_block.setdefault(int(block), {})[int(call)] = (True, set())
        number, block, consumer, done = self._held.T
        held = waiting[block] & (position < done)
        for run, b, call in zip(number[held], block[held], consumer[held], strict=True):
            calls = by_block.setdefault(int(b), {})
            calls.setdefault(int(call), (False, set()))[1].add(int(run))
        return {
            b: frozenset(Clique(call, kept, frozenset(runs)) for call, (kept, runs) in c.items())
            for b, c in by_block.items()
        }
