"""The file that `memfit fit -o` writes: a result with what made it, enough for a report."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from memfit.errors import RunFileError
from memfit.ir.codec import from_data, to_data, unpacked
from memfit.ir.ended import VERDICTS, NoResult
from memfit.ir.file_check import fault_in_profile, fault_in_result, of_version
from memfit.ir.plan import SCHEMA_VERSION as PLAN_VERSION
from memfit.ir.plan import Plan
from memfit.ir.plan_check import fault_in
from memfit.ir.profile import SCHEMA_VERSION as PROFILE_VERSION
from memfit.ir.profile import Profile
from memfit.ir.result import SCHEMA_VERSION, Result
from memfit.ir.swap import SwapStatistics


@dataclass(frozen=True)
class RunFile:
    """A result, its plan, the profile it was planned from and the command that was given.

    `refused` stands in the place of a result that a fit did not come to; then there is no plan, and
    the profile only if one was made. `plain` is the profile of the plain step, where the planned
    one has another set-up or a batch in parts. What an older file has not is None or empty.
    """

    result: Result | None
    plan: Plan | None = None
    profile: Profile | None = None
    plain: Profile | None = None
    command: str = ""
    memfit: str = ""
    refused: NoResult | None = None

    def __post_init__(self) -> None:
        assert (self.result is None) != (self.refused is None)

    def to_json(self) -> dict[str, Any]:
        """The result's own object, with the rest beside it."""
        own = self.result or self.refused
        assert own is not None
        about = {"memfit": self.memfit, "command": self.command}
        parts = {"plan": self.plan, "profile": self.profile, "plain": self.plain}
        return {**own.to_json(), **about, **{k: to_data(v) for k, v in parts.items()}}

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> RunFile:
        """Read what `save` wrote, or what `memfit fit --json` printed; gzip may have packed it."""
        try:
            text = unpacked(path).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise RunFileError(
                f"cannot read the result {str(path)!r}: {error}",
                hint="make one with: memfit fit TARGET --budget B -o run.json",
            ) from error
        try:
            data = json.loads(text)
            return _read(of_version(data, SCHEMA_VERSION))
        except (ValueError, TypeError) as error:
            raise RunFileError(
                f"{str(path)!r} is not the result of a fit: {error}",
                hint="it is what memfit fit TARGET --budget B -o run.json writes",
            ) from error


def _read(data: dict[str, Any]) -> RunFile:
    plan = data.pop("plan", None)
    profile, plain = (data.pop(name, None) for name in ("profile", "plain"))
    about = {name: str(data.pop(name, "")) for name in ("command", "memfit")}
    if isinstance(swap := data.get("swap"), dict):  # the rest is derived from these
        known = {field.name for field in fields(SwapStatistics)}
        data["swap"] = {name: value for name, value in swap.items() if name in known}
    refused = data.get("verdict") in VERDICTS
    return RunFile(
        None if refused else _whole_result(data),
        None if plan is None else _whole_plan(plan),
        None if profile is None else _whole_profile(profile, "profile"),
        None if plain is None else _whole_profile(plain, "plain profile"),
        **about,
        refused=from_data(NoResult, data) if refused else None,
    )


def _whole_plan(data: Any) -> Plan:
    """The plan; ValueError where no model could run it."""
    plan = from_data(Plan, of_version(data, PLAN_VERSION, "plan"))
    if (fault := fault_in(plan)) is not None:
        raise ValueError(f"its plan cannot be run: {fault}")
    return plan


def _whole_profile(data: Any, name: str) -> Profile:
    """The profile; ValueError where it is of no step."""
    profile = from_data(Profile, of_version(data, PROFILE_VERSION, name))
    if (fault := fault_in_profile(profile)) is not None:
        raise ValueError(f"its {name} {fault}")
    return profile


def _whole_result(data: Any) -> Result:
    """The result; ValueError where it has numbers that no fit comes to."""
    result = from_data(Result, data)
    if (fault := fault_in_result(result)) is not None:
        raise ValueError(f"it {fault}")
    return result
