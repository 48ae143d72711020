"""MemorySeries: the memory of a training loop, phase by phase, step by step."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from memfit.errors import UsageError
from memfit.ir.codec import from_data, to_data
from memfit.ir.file_check import fault_in_series, of_version

SCHEMA_VERSION = 1
MB = 2**20
GB = 2**30
SPIKE_MB = 100.0
CSV_COLUMNS = ("step", "phase", "used_mb", "total_mb", "utilization_percent")


class PhaseStatistics(NamedTuple):
    """Mean, highest and lowest use of a phase, in MB (2^20 bytes)."""

    mean: float
    max: float
    min: float


class Spike(NamedTuple):
    """A rise of the memory in use, in MB (2^20 bytes), and where it was seen."""

    step: int
    delta_mb: float
    phase: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The memory of one phase of one step.

    `used_bytes` is the most that was in use inside the phase, `final_bytes` what was at its end.
    `held_bytes` is the most that the allocator held for it, `split_bytes` what of that lay free at
    the end in blocks that are in use in part; None where that is not known.
    `seconds` is how long it took on the device's own timeline; None where that was not asked for.
    """

    step: int
    phase: str
    used_bytes: int
    final_bytes: int
    held_bytes: int | None = None
    retries: int = 0
    seconds: float | None = None
    split_bytes: int | None = None

    @property
    def used_mb(self) -> float:
        """The most in use, in MB."""
        return self.used_bytes / MB

    @property
    def fragmentation(self) -> float | None:
        """The share of what was held that lay in free pieces of used blocks at the end, 0 to 1."""
        if self.split_bytes is None or not self.held_bytes:
            return None
        return self.split_bytes / self.held_bytes


@dataclass(frozen=True)
class MemorySeries:
    """What a memory profiler saw.

    `counts` says what the bytes are: "allocated" by torch on a CUDA device, "resident" pages of
    the process, or "live" bytes of tensors. `capacity_bytes` is what the process may take.
    """

    device: str
    counts: str
    capacity_bytes: int
    initial_bytes: int
    snapshots: tuple[Snapshot, ...]
    duration_s: float
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def peak(self) -> Snapshot:
        """The first of the snapshots with the highest use; UsageError when there is none."""
        if not self.snapshots:
            raise UsageError(
                "nothing was recorded, so there is no peak",
                hint="call record_step(step, phase) at the end of every step, or use steps(loader)",
            )
        return max(self.snapshots, key=lambda s: s.used_bytes)

    @property
    def final_bytes(self) -> int:
        """What was in use at the end of the last phase; at the start, when there was none."""
        return self.snapshots[-1].final_bytes if self.snapshots else self.initial_bytes

    @property
    def peak_utilization(self) -> float:
        """The peak as a share of the capacity."""
        return self.peak.used_bytes / self.capacity_bytes

    @property
    def fragmentation(self) -> float | None:
        """The most of any phase: free pieces, which no other process can have."""
        found = [s.fragmentation for s in self.snapshots if s.fragmentation is not None]
        return max(found, default=None)

    @property
    def unused_share(self) -> float | None:
        """The share of the most that was held which the peak did not need: cache and pieces."""
        held = max((s.held_bytes or 0 for s in self.snapshots), default=0)
        return max(0.0, 1 - self.peak.used_bytes / held) if held else None

    @property
    def retries(self) -> int:
        """How often the allocator had to empty its cache and try again."""
        return sum(s.retries for s in self.snapshots)

    @property
    def steps(self) -> tuple[int, ...]:
        """The recorded steps in order."""
        return tuple(dict.fromkeys(s.step for s in self.snapshots))

    def step_peaks(self) -> dict[int, Snapshot]:
        """The snapshot with the highest use of every step."""
        peaks: dict[int, Snapshot] = {}
        for snapshot in self.snapshots:
            known = peaks.get(snapshot.step)
            if known is None or snapshot.used_bytes > known.used_bytes:
                peaks[snapshot.step] = snapshot
        return peaks

    def phase_statistics(self) -> dict[str, PhaseStatistics]:
        """Mean, highest and lowest use of every phase, in MB, in the order they first came."""
        sizes: dict[str, list[float]] = {}
        for snapshot in self.snapshots:
            sizes.setdefault(snapshot.phase, []).append(snapshot.used_mb)
        return {name: PhaseStatistics(fmean(s), max(s), min(s)) for name, s in sizes.items()}

    def phase_seconds(self) -> dict[str, float]:
        """Mean seconds of every phase in a step, the time outside all phases included.

        Empty where no time was taken.
        """
        totals: dict[str, float] = {}
        for snapshot in self.snapshots:
            if snapshot.seconds is not None:
                totals[snapshot.phase] = totals.get(snapshot.phase, 0.0) + snapshot.seconds
        return {name: total / len(self.steps) for name, total in totals.items()}

    def identify_spikes(self, threshold_mb: float = SPIKE_MB) -> list[Spike]:
        """Every rise by more than `threshold_mb` MB, in the order of the steps.

        A phase is compared with itself in the step before; where that step had no such phase, with
        that step's peak.
        """
        number = isinstance(threshold_mb, int | float) and not isinstance(threshold_mb, bool)
        if not number or not math.isfinite(threshold_mb) or threshold_mb <= 0:
            raise UsageError(
                f"threshold_mb is {threshold_mb!r}, not a number of MB above zero",
                hint="identify_spikes(100) finds rises by more than 100 MB from step to step",
            )
        spikes: list[Spike] = []
        before: list[Snapshot] = []
        for group in self._by_step():
            for snapshot in group if before else ():
                rise = (snapshot.used_bytes - _reference(snapshot.phase, before)) / MB
                if rise > threshold_mb:
                    spikes.append(Spike(snapshot.step, rise, snapshot.phase))
            before = group
        return spikes

    def rows(self) -> list[dict[str, object]]:
        """A row for every snapshot, as the CSV file has them; MB are 2^20 bytes."""
        return [
            {
                "step": s.step,
                "phase": s.phase,
                "used_mb": round(s.used_mb, 3),
                "total_mb": round(self.capacity_bytes / MB, 3),
                "utilization_percent": round(100 * s.used_bytes / self.capacity_bytes, 3),
            }
            for s in self.snapshots
        ]

    def to_json(self) -> dict[str, Any]:
        """The series with what is derived from it; `load` reads it back."""
        data: dict[str, Any] = to_data(self)
        data["summary"] = self._summary() if self.snapshots else None
        return {"schema_version": data.pop("schema_version"), **data}

    @staticmethod
    def load(path: str | Path) -> MemorySeries:
        """Read a series that `export_json` wrote."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            of_version(data, SCHEMA_VERSION)
            data.pop("summary", None)  # derived: made again
            series = from_data(MemorySeries, data)
            if (fault := fault_in_series(series)) is not None:
                raise ValueError(f"it {fault}")
            return series
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{str(path)!r} is not a memory series: {error}",
                hint="write one with profiler.export_json(path)",
            ) from error

    def _summary(self) -> dict[str, Any]:
        peak = self.peak
        return {
            "peak_bytes": peak.used_bytes,
            "peak_step": peak.step,
            "peak_phase": peak.phase,
            "peak_utilization": self.peak_utilization,
            "final_bytes": self.final_bytes,
            "fragmentation": self.fragmentation,
            "unused_share": self.unused_share,
            "retries": self.retries,
            "num_steps": len(self.steps),
            "phases": {name: row._asdict() for name, row in self.phase_statistics().items()},
            "phase_s": self.phase_seconds(),
            "spikes": [spike._asdict() for spike in self.identify_spikes()],
        }

    def _by_step(self) -> list[list[Snapshot]]:
        groups: list[list[Snapshot]] = []
        for snapshot in self.snapshots:
            if not groups or groups[-1][0].step != snapshot.step:
                groups.append([])
            groups[-1].append(snapshot)
        return groups


def _reference(phase: str, before: Sequence[Snapshot]) -> int:
    same = [s.used_bytes for s in before if s.phase == phase]
    return max(same or [s.used_bytes for s in before])
