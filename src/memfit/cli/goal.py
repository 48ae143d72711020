"""The goal of a fit or a plan, checked before anything slow begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memfit.errors import UsageError

if TYPE_CHECKING:
    from memfit.ir.profile import DeviceFacts, Profile

EXECUTORS = ("auto", "graph", "inductor", "module")


@dataclass(frozen=True)
class GoalOptions:
    """What was asked for: at most one of the first three, and how to get there.

    `brought` are the options and techniques in it that a preset or a file gives, not the user.
    """

    budget: str | None
    utilization: float | None
    activation_reduction: float | None
    max_slowdown: float | None
    strategy: str | None
    interval: int | None
    segments: Sequence[str]
    allow: Sequence[str]
    executor: str | None = None
    min_tensor_bytes: str | None = None
    host_budget: str | None = None
    force: Sequence[str] = ()
    brought: frozenset[str] = frozenset()

    @property
    def given(self) -> list[str]:
        """The options that say how much memory to use."""
        return [option for option, value in self._sizes().items() if value is not None]

    @property
    def allowed_names(self) -> list[str]:
        """The techniques that --allow names, one by one."""
        return [name.strip() for text in self.allow for name in text.split(",")]

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
            "--executor": self.executor,
            "--min-tensor-bytes": self.min_tensor_bytes,
            "--host-budget": self.host_budget,
            "--force": self.force or None,
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
        check_executor(self.executor)
        _ = self.smallest_bytes, self._host_bytes  # raise when they are no sizes
        allowed_techniques(self._techniques())
        strategy = self.strategy or "optimal"
        for name in self._strategies if several_strategies else [strategy]:
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
            "executor": self.executor,
            "min_tensor_bytes": self.smallest_bytes,
            "host_budget": self._host_bytes,
            "force": self.force,
        }

    def techniques_on(self, device_type: str) -> tuple[str, ...]:
        """What plans may use there; UsageError for a host budget that nothing may use."""
        from memfit.planning.techniques import AVAILABLE, last_resort, techniques_for

        allow, names = self._techniques(), self._strategies
        found = {t for name in names for t in techniques_for(name, allow, device_type)}
        more = {t for name in names for t in last_resort(name, allow, device_type)}
        if self.host_budget is not None and "offload" not in found | more:
            raise UsageError(
                "--host-budget is given, but nothing may be moved to the host",
                hint="allow it: --allow +offload",
            )
        return tuple(t for t in AVAILABLE if t in found)

    def left_out_on(self, device_type: str) -> dict[str, str]:
        """Why a plan under these options may be without a technique, by technique."""
        from memfit.planning.techniques import left_out

        return left_out(self.strategy or "optimal", self._techniques(), device_type)

    def for_many_budgets(self) -> tuple[GoalOptions, list[str]]:
        """What many budgets are planned with, and a line on what a preset or file gives beside it.

        Its budget is for one plan, and techniques of the loss and the optimizer are tried for one
        budget; UsageError for those that were given.
        """
        from memfit.planning.techniques import MICROBATCH, STEP

        names = self.allowed_names
        single = [n for n in names if n.removeprefix("+") in (*STEP, MICROBATCH)]
        given = [n.removeprefix("+") for n in single if n.removeprefix("+") not in self.brought]
        if given:
            raise UsageError(
                f"{given[0]} is tried for one budget, and here are many",
                hint="leave it out here, and give it to plan or fit with a budget",
            )
        left = [name for name in names if name not in single]
        if not left and not all(name.startswith("+") for name in single):
            raise UsageError(
                f"the preset or file allows only {', '.join(single)}: tried for one budget, and "
                "here are many",
                hint="give a budget, or --allow recompute here",
            )
        apart = [
            f"{o} {v}" for o, v in self._sizes().items() if v is not None and o in self.brought
        ]
        goal = replace(self, allow=left)
        if apart:
            goal = replace(goal, budget=None, utilization=None, activation_reduction=None)
        apart += [name.removeprefix("+") for name in single]
        if not apart:
            return self, []
        return goal, [f"many budgets: planned without {', '.join(apart)} of the preset or file"]

    def for_strategy(self, name: str, device_type: str) -> GoalOptions:
        """The same for one of several strategies; the host budget is for those that can use it."""
        one = replace(self, strategy=name, host_budget=None)
        moves = "offload" in one.techniques_on(device_type)
        return replace(one, host_budget=self.host_budget) if moves else one

    def minimum_bytes(self, profile: Profile) -> int:
        """The smallest budget that any plan under these options holds."""
        from memfit.planning.make_plan import minimum_feasible
        from memfit.runtime.swap.host_memory import default_host_budget

        techniques = self.techniques_on(profile.device.type)
        host_bytes = self._host_bytes
        if host_bytes is None and "offload" in techniques:
            host_bytes = default_host_budget()
        return minimum_feasible(profile, self.smallest_bytes, techniques, host_bytes)[0]

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
        forced = [w for name in self.force for w in ("--force", name)]
        return [*_given(named), *self._shared_words(self.allow), *forced]

    def setup_words(self) -> list[str]:
        """The words that every command on the same step must share, whatever its strategy.

        What the strategy given here allows by its name is allowed by words of their own.
        """
        from memfit.planning.techniques import NEEDS

        moves = any("offload" in NEEDS.get(name, ()) for name in self._strategies)
        return self._shared_words(["+offload"] if moves and not self.allow else self.allow)

    def limited_words(self) -> list[str]:
        """Those words, with the slowdown that one of several plans may have."""
        return [*self.setup_words(), *_given({"--max-slowdown": self.max_slowdown})]

    def sweep_words(self) -> list[str]:
        """Those words for a sweep, which plans activations only."""
        from memfit.planning.techniques import MICROBATCH, STEP

        names = [
            n for n in self._techniques() or () if n.removeprefix("+") not in (*STEP, MICROBATCH)
        ]
        return replace(self, allow=names).setup_words()

    def _shared_words(self, allow: Sequence[str]) -> list[str]:
        sizes = {
            "--min-tensor-bytes": self.min_tensor_bytes,
            "--host-budget": self.host_budget,
        }
        return [
            *setup_words(self.segments, self.executor),
            *(w for name in allow for w in ("--allow", name)),
            *_given(sizes),
        ]

    @property
    def smallest_bytes(self) -> int:
        """Tensors below this size are always kept."""
        from memfit.units import parse_bytes

        return 0 if self.min_tensor_bytes is None else parse_bytes(self.min_tensor_bytes)

    @property
    def _host_bytes(self) -> int | None:
        """At most so many may wait on the host; None: a safe share of what is free."""
        from memfit.units import parse_bytes

        return None if self.host_budget is None else parse_bytes(self.host_budget)

    @property
    def _strategies(self) -> list[str]:
        return (self.strategy or "optimal").split(",")

    def _techniques(self) -> list[str] | None:
        return self.allowed_names or None

    def _sizes(self) -> dict[str, str | float | None]:
        return {
            "--budget": self.budget,
            "--utilization": self.utilization,
            "--activation-reduction": self.activation_reduction,
        }


def refuse_together(options: Sequence[str]) -> None:
    """Raise UsageError when more than one of options that exclude each other was given."""
    if len(options) > 1:
        raise UsageError(
            f"{' and '.join(options)} exclude each other",
            hint=f"give one, for example {options[0]}",
        )


def check_executor(name: str | None) -> None:
    """Raise UsageError for an executor that there is not."""
    if name is not None and name not in EXECUTORS:
        raise UsageError(f"unknown executor {name!r}", hint=f"one of: {', '.join(EXECUTORS)}")


def setup_words(segments: Sequence[str], executor: str | None) -> list[str]:
    """The options that say how the step is measured, to be put into another command."""
    patterns = [w for pattern in segments for w in ("--segments", pattern)]
    return [*patterns, *_given({"--executor": executor})]


def _given(named: Mapping[str, object]) -> list[str]:
    """Options that have a value, as words of a command line."""
    return [w for option, value in named.items() if value is not None for w in (option, str(value))]
