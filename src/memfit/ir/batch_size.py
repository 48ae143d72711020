"""BatchSizes: what a search for a batch size ran, and what it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memfit.ir.codec import to_data

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class BatchTrial:
    """The plain step at one batch size, run under the budget.

    `backward_peak_bytes` is the peak of forward and backward, without the optimizer. A step that
    does not hold is not timed; where it could not be run, `failure` says why and nothing is known.
    """

    size: int
    holds: bool
    peak_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    backward_peak_bytes: int | None = None
    step_s: float | None = None
    predicted_bytes: int | None = None  # made before the run; None: nothing to predict from
    failure: str | None = None

    @property
    def samples_per_s(self) -> float | None:
        """Samples trained on per second."""
        return None if self.step_s is None else self.size / self.step_s


@dataclass(frozen=True)
class PlannedBatch:
    """The largest batch that a plan was found and verified for, within the same budget."""

    size: int
    predicted_size: int
    predicted_bytes: int
    peak_bytes: int
    peak_reserved_bytes: int
    step_s: float
    time_ratio: float | None  # to the same batch without a plan; None: that does not fit
    techniques: tuple[str, ...]

    @property
    def samples_per_s(self) -> float:
        """Samples trained on per second."""
        return self.size / self.step_s


@dataclass(frozen=True)
class BatchSizes:
    """The largest and the fastest batch size within a budget; both were run under it."""

    workload: dict[str, str]
    device: dict[str, Any]
    budget_bytes: int
    trials: tuple[BatchTrial, ...]
    largest: BatchTrial
    fastest: BatchTrial
    planned: PlannedBatch | None = None  # None: not asked for, or no plan allows a larger one
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """The object that `memfit batch-size --json` prints."""
        data: dict[str, Any] = to_data(self)
        for name in ("largest", "fastest", "planned"):
            found = getattr(self, name)
            if found is not None:
                data[name]["samples_per_s"] = found.samples_per_s
        for row, trial in zip(data["trials"], self.trials, strict=True):
            row["samples_per_s"] = trial.samples_per_s
        data["num_runs"] = len(self.trials)
        return {"schema_version": data.pop("schema_version"), **data}
