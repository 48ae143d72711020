"""Plan: what to do with every segment call, and what that is expected to give."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from memfit.errors import PlanFileError
from memfit.ir.codec import from_data, to_data

SCHEMA_VERSION = 1
KEEP, RECOMPUTE = "keep", "recompute"


@dataclass(frozen=True)
class SegmentPlan:
    """The decision for one segment call. `run` numbers the calls recomputed together."""

    name: str
    module: str
    number: int
    visits: int
    kind: str
    decision: str
    saved_bytes: int
    recompute_s: float
    reason: str
    run: int | None = None
    mutated_buffers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prediction:
    """What the simulator expects of the planned step."""

    peak_bytes: int
    reserved_bytes: int
    step_s: float
    lower_bound_s: float
    gap: float
    categories: dict[str, int]
    where: str


@dataclass(frozen=True)
class Plan:
    """Pure data: which calls are recomputed, for which workload, with which expectation."""

    fingerprint: str
    workload: dict[str, str]
    torch: str
    strategy: str
    budget_bytes: int | None
    segments: tuple[SegmentPlan, ...]
    predicted: Prediction
    baseline_peak_bytes: int
    baseline_step_s: float
    static_bytes: int
    minimum_feasible_bytes: int
    plan_s: float = 0.0
    executor: str = "module"
    counts: str = "reserved"  # what must stay within the budget: "reserved" or "live" bytes
    techniques: tuple[str, ...] = ()
    trim: bool = False  # give the allocator's free pages back between forward and backward
    inplace_off: tuple[str, ...] = ()
    model_calls: int = 1  # how often the step calls the model itself
    notes: tuple[str, ...] = ()
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The runs (first, last) of calls that are recomputed as one."""
        members: dict[int, list[int]] = {}
        for index, segment in enumerate(self.segments):
            if segment.run is not None:
                members.setdefault(segment.run, []).append(index)
        return [(calls[0], calls[-1]) for calls in members.values()]

    @property
    def route(self) -> list[tuple[str, int, int]]:
        """Module, number of the call and number of calls, for every segment."""
        return [(s.module, s.number, s.visits) for s in self.segments]

    def bytes_of(self, decision: str) -> int:
        """Saved bytes of the segments with this decision."""
        return sum(s.saved_bytes for s in self.segments if s.decision == decision)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(to_data(self), indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that `save` wrote."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanFileError(
                f"cannot read the plan {str(path)!r}: {error}",
                hint="make one with: memfit plan TARGET --budget B -o plan.json",
            ) from error
        try:
            data = json.loads(text)
            if not isinstance(data, dict):
                raise ValueError("not a JSON object")
            version = data.get("schema_version")
            if version != SCHEMA_VERSION:
                raise ValueError(f"schema_version is {version!r}, this memfit reads 1")
            return from_data(Plan, data)
        except (ValueError, TypeError, KeyError) as error:
            raise PlanFileError(
                f"{str(path)!r} is not a whole memfit plan: {error}",
                hint="the file may be cut off or of another version: make the plan again",
            ) from error
