"""The goal of a fit or a plan, checked before anything slow begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit.errors import UsageError

if TYPE_CHECKING:
    from memfit.ir.profile import DeviceFacts


@dataclass(frozen=True)
class GoalOptions:
    """What was asked for: at most one of the first three, and how to get there."""

    budget: str | None
    utilization: float | None
    activation_reduction: float | None
    max_slowdown: float | None
    strategy: str | None
    interval: int | None
    segments: Sequence[str]
    allow: Sequence[str]

    @property
    def given(self) -> list[str]:
        """The options that say how much memory to use."""
        named = {
            "--budget": self.budget,
            "--utilization": self.utilization,
            "--activation-reduction": self.activation_reduction,
        }
        return [option for option, value in named.items() if value is not None]

    @property
    def aims(self) -> bool:
        """Whether there is something to plan for: bytes, or a strategy that needs none."""
        return bool(self.given) or self.strategy not in (None, "optimal")

    @property
    def planning_options(self) -> list[str]:
        """The options given that say how to make a plan."""
        named = {
            "--max-slowdown": self.max_slowdown,
            "--strategy": self.strategy,
            "--interval": self.interval,
            "--segments": self.segments or None,
            "--allow": self.allow or None,
        }
        return [option for option, value in named.items() if value is not None]

    def check(self, *, several_strategies: bool = False) -> None:
        """Raise UsageError for options that contradict each other or mean nothing."""
        from memfit.planning.budget import check_budget_text
        from memfit.planning.make_plan import Goal
        from memfit.planning.techniques import allowed_techniques

        refuse_together(self.given)
        if self.budget is not None:
            check_budget_text(self.budget)
        if self.utilization is not None and not 0 < self.utilization <= 1:
            raise UsageError(
                f"--utilization is {self.utilization:g}, not a share of the device",
                hint="0.8 is 80 % of the device's memory",
            )
        if self.interval is not None and self.strategy != "interval":
            raise UsageError("--interval is for strategy interval", hint="add --strategy interval")
        if self.max_slowdown is not None and not self.aims and not several_strategies:
            raise UsageError(
                "--max-slowdown limits a goal, and none is given",
                hint="add --budget B or --activation-reduction SHARE",
            )
        allowed_techniques(self._techniques())
        strategy = self.strategy or "optimal"
        for name in strategy.split(",") if several_strategies else [strategy]:
            Goal(
                strategy=name,
                max_slowdown=self.max_slowdown,
                activation_reduction=self.activation_reduction,
                interval=self.interval,
            )

    def budget_on(self, device: DeviceFacts) -> str | int | None:
        """The budget as the library takes it."""
        if self.utilization is None:
            return self.budget
        return int(self.utilization * device.capacity_bytes)

    def plan_options(self) -> dict[str, Any]:
        """The keyword arguments that `plan` and `fit_workload` share."""
        return {
            "strategy": self.strategy or "optimal",
            "allow": self._techniques(),
            "max_slowdown": self.max_slowdown,
            "activation_reduction": self.activation_reduction,
            "interval": self.interval,
        }

    def words(self) -> list[str]:
        """The options as they were given, to be put into another command."""
        named = {
            "--budget": self.budget,
            "--utilization": self.utilization,
            "--activation-reduction": self.activation_reduction,
            "--max-slowdown": self.max_slowdown,
            "--strategy": self.strategy,
            "--interval": self.interval,
        }
        words = [w for o, v in named.items() if v is not None for w in (o, str(v))]
        words += [w for pattern in self.segments for w in ("--segments", pattern)]
        return words + [w for name in self.allow for w in ("--allow", name)]

    def _techniques(self) -> list[str] | None:
        return [name for text in self.allow for name in text.split(",")] or None


def refuse_together(options: Sequence[str]) -> None:
    """Raise UsageError when more than one of options that exclude each other was given."""
    if len(options) > 1:
        raise UsageError(
            f"{' and '.join(options)} exclude each other",
            hint=f"give one, for example {options[0]}",
        )
