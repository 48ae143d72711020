"""Fill what a command leaves open from a preset and a configuration file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from memfit.cli.goal import GoalOptions
from memfit.cli.target import Target

T = TypeVar("T")


def started(
    what: Target, goal: GoalOptions, accumulate: int | None, preset: str | None, file: Path | None
) -> tuple[Target, GoalOptions, int]:
    """Target, goal and accumulation with a preset's and a file's fields; the file goes first.

    What was given on the command line stays, also where it is 0; `--allow +name` adds to theirs.
    """
    if preset is None and file is None:
        return what, goal, _first(accumulate, 1)
    from memfit.config import starting_point

    base = starting_point(preset, file, strategy=goal.strategy, allow=goal.allowed_names)
    what = replace(
        what,
        batch=_first(what.batch, base.batch),
        seq=_first(what.seq, base.seq),
        dtype=_first(what.dtype, base.dtype),
        optimizer=_first(what.optimizer, base.optimizer),
    )
    brought = set[str]()
    if not goal.given:
        goal = replace(
            goal,
            budget=_text(base.budget),
            utilization=base.utilization,
            activation_reduction=base.activation_reduction,
        )
        brought.update(goal.given)
    asked = {name.removeprefix("+") for name in goal.allowed_names}
    brought.update({name.removeprefix("+") for name in base.allow} - asked)
    goal = replace(
        goal,
        max_slowdown=_first(goal.max_slowdown, base.max_slowdown),
        strategy=_first(goal.strategy, base.strategy),
        interval=_first(goal.interval, base.interval),
        segments=goal.segments or base.segments,
        allow=base.allow,
        force=goal.force or base.force,
        host_budget=_first(goal.host_budget, _text(base.host_budget)),
        executor=_first(goal.executor, base.executor),
        min_tensor_bytes=_first(goal.min_tensor_bytes, _text(base.min_tensor_bytes)),
        brought=frozenset(brought),
    )
    return what, goal, _first(accumulate, _first(base.accumulate, 1))


def _first(given: T | None, other: T) -> T:
    return other if given is None else given


def _text(value: str | int | None) -> str | None:
    return None if value is None else str(value)
