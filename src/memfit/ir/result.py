"""Result: what a fit promised, what was measured, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memfit.ir.codec import to_data
from memfit.ir.plan import TechniqueChoice
from memfit.ir.swap import SwapStatistics

SCHEMA_VERSION = 1
NO_MEASURE = 0.5  # of the gradients' length: from here on zeros are no further than is allowed


@dataclass(frozen=True)
class Numerics:
    """How the planned step's numbers compare with the unplanned step's, by the same executor.

    `repeatable` is False when the unplanned step differs from itself too. `eager_max_rel_diff` is
    how far the unplanned step is from the plain eager one, `error_vs_reference` how far both are
    from eager full precision, in gradients, where the executor changes the arithmetic.
    """

    bitwise_vs_unplanned: bool
    loss_max_abs_diff: float
    grad_max_rel_diff: float
    error_vs_reference: dict[str, float] | None = None
    eager_max_rel_diff: float | None = None
    agree: bool = False  # what the executor promises holds
    repeatable: bool = True
    note: str | None = None

    @property
    def reference_judges(self) -> bool:
        """Whether full precision is so near that it tells wrong gradients from right ones."""
        errors = self.error_vs_reference
        return errors is not None and errors["unplanned"] < NO_MEASURE

    @property
    def kept(self) -> bool:
        """Whether the plan left the numbers as it promises, or none could be compared."""
        return self.agree or not self.repeatable


@dataclass(frozen=True)
class BaselineResult:
    """The unplanned step; `measured` is False when it did not fit and was simulated."""

    peak_bytes: int
    peak_reserved_bytes: int
    static_bytes: int
    step_s: float
    measured: bool


@dataclass(frozen=True)
class ReferenceResult:
    """A step without memfit, timed in turn with the planned one; `why_not` where it did not run.

    `planned_ratio` is the planned step's time over its own, `eager_ratio` its own over that of the
    eager step, where that was measured as well.
    """

    peak_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    step_s: float | None = None
    step_s_spread: float | None = None
    planned_ratio: float | None = None
    eager_ratio: float | None = None
    why_not: str | None = None


@dataclass(frozen=True)
class Predicted:
    """What the plan said."""

    peak_bytes: int
    peak_reserved_bytes: int
    step_s: float
    lower_bound_s: float
    gap: float
    time_ratio: float  # of the step to the unplanned one, as it was when it was profiled


@dataclass(frozen=True)
class Measured:
    """What the machine did. `same_code_ratio` times the plain step against itself (A/A)."""

    peak_bytes: int
    peak_reserved_bytes: int
    step_s: float
    step_s_spread: float
    time_ratio: float | None = None
    same_code_ratio: float | None = None
    retries: int = 0


@dataclass(frozen=True)
class Decisions:
    """Saved bytes by decision."""

    kept_bytes: int
    recomputed_bytes: int
    offloaded_bytes: int
    num_segments: int
    techniques: tuple[str, ...]
    choices: tuple[TechniqueChoice, ...] = ()


@dataclass(frozen=True)
class Result:
    """One fit, from budget to verdict."""

    workload: dict[str, str]
    device: dict[str, Any]
    budget_bytes: int
    baseline: BaselineResult
    predicted: Predicted
    measured: Measured
    decisions: Decisions
    numerics: Numerics
    plan_s: float
    verdict: str
    minimum_feasible_bytes: int
    references: dict[str, ReferenceResult | None] | None = None
    swap: SwapStatistics | None = None  # of the timed steps, when the plan moves something
    rounds: int = 1
    proof_s: float = 0.0  # of comparing numbers and timing steps, when the plan was ready
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """The object that `memfit fit --json` prints."""
        data: dict[str, Any] = to_data(self)
        if self.swap is not None:
            shown = ("out_gb_per_s", "in_gb_per_s", "stalled_s", "hidden_share")
            data["swap"].update((name, getattr(self.swap, name)) for name in shown)
        return {"schema_version": data.pop("schema_version"), **data}

    @property
    def peak_error(self) -> float:
        """Predicted over measured peak, less one."""
        return self.predicted.peak_bytes / self.measured.peak_bytes - 1

    @property
    def time_error(self) -> float:
        """Predicted over measured step time, less one.

        Each as a share of the unplanned step that was timed beside it: a device's clock may have
        changed between the profile and the measurement.
        """
        if self.measured.time_ratio is None:
            return self.predicted.step_s / self.measured.step_s - 1
        return self.predicted.time_ratio / self.measured.time_ratio - 1
