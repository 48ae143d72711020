"""RunReport: everything a report shows, collected once and drawn in many ways."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.ir.ended import INFEASIBLE, NoResult
from memfit.ir.plan import Plan
from memfit.ir.profile import Profile
from memfit.ir.replay import Replay
from memfit.ir.result import Result
from memfit.report.sweep import SweepRow


@dataclass(frozen=True)
class RunReport:
    """A plan for a profiled step, and its result if it was run.

    `before` is the step with everything kept, `after` the planned one; both are simulated. `before`
    is that of the `plain` profile, where the planned step has another set-up or a batch in parts.
    `command` made the report, `run_command` the result, which is empty where it is not known.
    """

    profile: Profile
    plan: Plan
    before: Replay
    after: Replay
    command: str
    made: str
    memfit: str
    result: Result | None = None
    run_command: str = ""
    plain: Profile | None = None
    curve: tuple[SweepRow, ...] = ()
    refused: NoResult | None = None  # of a fit without a result; then the plan is the nearest one

    def __post_init__(self) -> None:
        for replay in (self.before, self.after):
            assert sum(replay.peak_categories.values()) == replay.peak_bytes
            assert all(size >= 0 for sizes in replay.curves.values() for size in sizes)

    @property
    def name(self) -> str:
        """What is trained."""
        return self.profile.workload["name"]

    @property
    def measured_before_bytes(self) -> int | None:
        """The measured peak of the step that `before` shows; None: it was not measured."""
        baseline = (self.plain or self.profile).baseline
        return None if baseline is None else baseline.peak_bytes

    @property
    def measured_after_bytes(self) -> int | None:
        """The measured peak of the planned step; None: it was not run."""
        return None if self.result is None else self.result.measured.peak_bytes

    @property
    def before_words(self) -> str:
        """What `before` shows, in words."""
        return f"everything kept{_changes(self.plain or self.profile)}"

    @property
    def after_words(self) -> str:
        """What `after` shows, in words."""
        what = "planned" if self.holds else "the nearest plan,"
        return f"{what} by {self.plan.strategy}{_changes(self.profile)}"

    @property
    def holds(self) -> bool:
        """Whether the plan is one for the budget that was asked for: no other one was found."""
        return self.refused is None or self.refused.verdict != INFEASIBLE


@dataclass(frozen=True)
class EndedReport:
    """A fit that ended before there was a profile: why, how far it came and what was live."""

    refused: NoResult
    command: str
    made: str
    memfit: str
    run_command: str = ""


def _changes(profile: Profile) -> str:
    """What is not as in a plain step, in brackets."""
    parts = [*profile.setup]
    if profile.accumulate > 1:
        parts.append(f"one of the {profile.accumulate} parts of a step")
    elif profile.looks_first:
        parts.append("the second of its two passes")
    return f" ({', '.join(parts)})" if parts else ""
