"""BenchReport: what a benchmark ran, cell by cell. A cell is one workload under one system."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memfit.errors import UsageError
from memfit.ir.codec import from_data, to_data
from memfit.ir.file_check import fault_in_bench

SCHEMA_VERSION = 1
KIND = "memfit bench"
# What became of a cell. Only `ok` has numbers; the others say why in `reason`.
OK = "ok"
REFUSED = "refused"  # the system says no: a budget that no plan holds
UNAVAILABLE = "unavailable"  # not installed, or it cannot run this workload
OUT_OF_MEMORY = "out of memory"
FAILED = "failed"  # an error in the cell's process
CRASHED = "crashed"  # the process died
TIMED_OUT = "timed out"
DIED = (OUT_OF_MEMORY, FAILED, CRASHED, TIMED_OUT)


@dataclass(frozen=True)
class WorkloadSpec:
    """A target and its options; `series` names workloads that differ in their batch alone."""

    name: str
    target: str
    batch: int | None = None
    seq: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    device: str | None = None
    fields: tuple[str, ...] = ()
    series: str | None = None


@dataclass(frozen=True)
class ByRounds:
    """The median ratio of two steps that were timed in the same rounds.

    The true one lies between `low` and `high` in 19 of 20 cases.
    """

    ratio: float
    low: float
    high: float

    @property
    def within(self) -> float:
        """How far the true one may be from `ratio`: to the farther of both, outliers lie there."""
        return max(self.high - self.ratio, self.ratio - self.low)


@dataclass(frozen=True)
class Reference:
    """The step a cell is compared with, timed in turn with it, and again against itself (A/A).

    `kind` is "eager", or "unplanned": memfit's own code with everything kept, where the eager step
    does not fit.
    """

    kind: str
    peak_bytes: int
    reserved_bytes: int
    retries: int
    step_s: float
    spread_s: float
    again_s: float
    again_by_rounds: ByRounds | None = None  # None: of a benchmark before there were any


@dataclass(frozen=True)
class Planned:
    """What a memfit cell promised and did. The unplanned step is the same executor's.

    `measured_peak_bytes` and `measured_reserved_bytes` were taken under the cap of the budget.
    """

    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_reserved_bytes: int
    measured_reserved_bytes: int
    unplanned_peak_bytes: int
    static_bytes: int
    predicted_step_s: float
    predicted_ratio: float  # to the unplanned step
    measured_ratio: float | None  # None: the unplanned step does not fit
    unplanned_step_s: float  # timed beside the plan, or predicted where it does not fit
    gap: float
    executor: str
    techniques: tuple[str, ...]
    segments: int
    chosen: tuple[str, ...]  # segments that are not simply kept
    numbers_agree: bool
    bitwise: bool
    numbers_note: str | None
    fit_s: float  # without a profile that another cell had made
    profile_of: str | None = None  # the system whose cell had made it
    profile_s: float = 0.0  # of the fit's seconds, those of its own profile
    proof_s: float = 0.0  # and those of comparing numbers and timing steps
    notes: tuple[str, ...] = ()  # of the fit

    @property
    def estimated_saved_bytes(self) -> int:
        """What the plan was to take off the unplanned step's peak."""
        return self.unplanned_peak_bytes - self.predicted_peak_bytes

    @property
    def measured_saved_bytes(self) -> int:
        """What it took off."""
        return self.unplanned_peak_bytes - self.measured_peak_bytes

    @property
    def estimated_added_s(self) -> float:
        """What the plan was to add to the unplanned step that was timed beside it."""
        return (self.predicted_ratio - 1) * self.unplanned_step_s

    @property
    def measured_added_s(self) -> float | None:
        """What it added."""
        if self.measured_ratio is None:
            return None
        return (self.measured_ratio - 1) * self.unplanned_step_s


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch in a budget, plain and with a plan; both were run under it."""

    budget_bytes: int
    plain_size: int
    plain_samples_per_s: float | None
    planned_size: int | None = None  # None: no plan holds a larger one
    planned_samples_per_s: float | None = None
    planned_ratio: float | None = None  # to that batch without a plan; None: it does not fit
    techniques: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compiled:
    """Graphs that torch's compiler was given in a cell, and how many it had on disk already.

    `cold`: there was nothing at all on disk when the cell began.
    """

    graphs: int
    cached: int
    cold: bool

    @property
    def label(self) -> str:
        """Where the compiled code came from."""
        if self.cold:
            return "cold"
        if self.cached == 0:
            return "compiled, but kernels of earlier cells may be on disk"
        return f"cached: {self.cached} of {self.graphs} graphs were on disk"


@dataclass(frozen=True)
class Cell:
    """One workload under one system, as its own process measured it."""

    workload: str
    system: str
    status: str
    reason: str | None = None
    seconds: float = 0.0  # of the whole process
    forked: bool = False  # from a process that had imported everything
    stages: dict[str, float] = field(default_factory=dict)  # seconds of what it did
    compiled: Compiled | None = None
    device: str | None = None
    reference: Reference | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    retries: int = 0
    step_s: float | None = None
    spread_s: float = 0.0
    samples: int = 0
    by_rounds: ByRounds | None = None  # to the reference; None: not timed in the same rounds
    first_steps_s: float | None = None  # with everything that is compiled or set up
    breakdown: dict[str, int] = field(default_factory=dict)  # of the peak, predicted
    planned: Planned | None = None
    largest: LargestBatch | None = None
    notes: tuple[str, ...] = ()
    code: str | None = None  # which state of memfit's code ran it; None: of a benchmark before

    @property
    def key(self) -> str:
        """Its name in a report."""
        return f"{self.workload} | {self.system}"

    @property
    def ok(self) -> bool:
        """Whether it ran and has numbers."""
        return self.status == OK

    @property
    def ratio(self) -> float | None:
        """Its time over the reference's, of the same run."""
        if self.step_s is None or self.reference is None:
            return None
        if self.by_rounds is not None:
            return self.by_rounds.ratio
        return self.step_s / self.reference.step_s

    @property
    def same_code_ratio(self) -> float | None:
        """The reference against itself: what the clock makes of no difference."""
        if self.reference is None:
            return None
        if self.reference.again_by_rounds is not None:
            return self.reference.again_by_rounds.ratio
        return self.reference.again_s / self.reference.step_s

    @property
    def noise(self) -> float:
        """Differences in `ratio` up to this share mean nothing.

        A/A, and what the ratios by rounds may be off by; both spreads where there are none.
        """
        if self.step_s is None or self.reference is None or self.same_code_ratio is None:
            return 0.0
        base, again = self.reference, self.reference.again_by_rounds
        apart = abs(self.same_code_ratio - 1)
        if self.by_rounds is not None and again is not None:
            return max(apart, again.within, self.by_rounds.within / self.by_rounds.ratio)
        return max(apart, self.spread_s / self.step_s, base.spread_s / base.step_s)

    @property
    def peak_ratio(self) -> float | None:
        """Its peak over the reference's."""
        if self.peak_bytes is None or self.reference is None:
            return None
        return self.peak_bytes / self.reference.peak_bytes


@dataclass(frozen=True)
class BenchReport:
    """Everything a benchmark has so far; a run that was cut goes on with it."""

    machine: dict[str, str]
    settings: dict[str, str]  # what every cell shares
    commands: tuple[str, ...] = ()
    workloads: tuple[WorkloadSpec, ...] = ()
    cells: tuple[Cell, ...] = ()
    kind: str = KIND
    schema_version: int = SCHEMA_VERSION

    def cells_of(self, workload: str) -> tuple[Cell, ...]:
        """The cells of one workload, in the order in which they were asked for."""
        return tuple(cell for cell in self.cells if cell.workload == workload)

    def find(self, workload: str, system: str) -> Cell | None:
        """The cell of this workload and system, if it was run."""
        found = (c for c in self.cells if (c.workload, c.system) == (workload, system))
        return next(found, None)

    def with_cell(self, spec: WorkloadSpec, cell: Cell) -> BenchReport:
        """The report with one more cell; one of the same name is replaced where it stands."""
        known = any(w.name == spec.name for w in self.workloads)
        workloads = self.workloads if known else (*self.workloads, spec)
        if self.find(cell.workload, cell.system) is None:
            return replace(self, workloads=workloads, cells=(*self.cells, cell))
        cells = tuple(cell if c.key == cell.key else c for c in self.cells)
        return replace(self, workloads=workloads, cells=cells)

    def to_json(self) -> dict[str, Any]:
        """The object in the file."""
        data: dict[str, Any] = to_data(self)
        return {"schema_version": data.pop("schema_version"), "kind": data.pop("kind"), **data}

    def save(self, path: Path) -> None:
        """Write the report; what was there stays whole until the new one is."""
        beside = path.with_name(f"{path.name}.part")
        try:
            beside.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
            os.replace(beside, path)
        except OSError as error:
            raise UsageError(
                f"{str(path)!r} cannot be written: {error.strerror}",
                hint="choose a place that exists and is yours to write to: -o FILE",
            ) from error

    @staticmethod
    def load(path: Path) -> BenchReport:
        """Read a report that `save` wrote."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"cannot read the benchmark {str(path)!r}: {error}",
                hint="make one with: memfit bench -o FILE",
            ) from error
        try:
            data = json.loads(text)
            if not isinstance(data, dict):
                raise ValueError("not a JSON object")
            if data.get("kind") != KIND:
                raise ValueError(f"its kind is {data.get('kind')!r}, not {KIND!r}")
            version = data.get("schema_version")
            if version != SCHEMA_VERSION:
                raise ValueError(f"schema_version is {version!r}, not {SCHEMA_VERSION}")
            report = from_data(BenchReport, data)
            if (fault := fault_in_bench(report)) is not None:
                raise ValueError(f"it {fault}")
            return report
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"{str(path)!r} is not a whole memfit benchmark: {error}",
                hint="it may be cut off, of another version or another file: choose another one",
            ) from error
