"""Fill what a command leaves open from a preset and a configuration file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from memfit.cli.goal import GoalOptions
from memfit.cli.target import Target


def started(
    what: Target, goal: GoalOptions, accumulate: int, preset: str | None, file: Path | None
) -> tuple[Target, GoalOptions, int]:
    """Target, goal and accumulation with a preset's and a file's fields; the file goes first."""
    if preset is None and file is None:
        return what, goal, accumulate
    from memfit.config import Config, load, named

    base = Config() if preset is None else named(preset)
    base = base if file is None else load(file).over(base)
    what = replace(
        what,
        batch=what.batch or base.batch,
        seq=what.seq or base.seq,
        dtype=what.dtype or base.dtype,
        optimizer=what.optimizer or base.optimizer,
    )
    if not goal.aims:
        budget = None if base.budget is None else str(base.budget)
        goal = replace(goal, budget=budget, utilization=base.utilization)
    goal = replace(
        goal,
        max_slowdown=goal.max_slowdown or (base.max_slowdown if goal.aims else None),
        strategy=goal.strategy or base.strategy,
        allow=goal.allow or list(base.allow),
        host_budget=goal.host_budget or _text(base.host_budget),
        executor=goal.executor or base.executor,
        min_tensor_bytes=goal.min_tensor_bytes or _text(base.min_tensor_bytes),
    )
    return what, goal, accumulate if accumulate != 1 else base.accumulate or 1


def _text(value: str | int | None) -> str | None:
    return None if value is None else str(value)
