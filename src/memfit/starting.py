"""Fill what a verb is not given from a preset and a configuration, as the command line does."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from memfit.config import Config, starting_point
from memfit.errors import UsageError
from memfit.ir.profile import Profile
from memfit.measure.device import device_facts
from memfit.workload import Workload

P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger(__name__)

GOALS = ("budget", "utilization", "activation_reduction")
OPTIONS = (
    "max_slowdown",
    "strategy",
    "interval",
    "segments",
    "force",
    "host_budget",
    "executor",
    "min_tensor_bytes",
)
OF_A_TARGET = ("batch", "seq", "dtype", "optimizer")  # a workload has its own
OF_A_PROFILE = ("segments", "executor")
OPEN = (None, (), "auto")


def started(verb: Callable[P, R]) -> Callable[P, R]:
    """The verb, with what it is not given taken from its `preset` and `config`."""
    signature = inspect.signature(verb)
    call: Callable[..., R] = verb

    @wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs.get("preset") is None and kwargs.get("config") is None:
            return verb(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        if given.get("plan") is not None:
            raise UsageError(
                "preset and config say how to make a plan, but plan gives one",
                hint="leave out plan or the others",
            )
        return call(**_filled(given, accumulates="accumulate" in signature.parameters))

    return run


def _filled(given: Mapping[str, Any], *, accumulates: bool) -> dict[str, Any]:
    """The arguments given, and those of the preset and configuration that were left open."""
    options = dict(given)
    _refuse_targets(starting_point(None, options.get("config")))
    base = starting_point(
        options.pop("preset", None),
        options.pop("config", None),
        strategy=given.get("strategy"),
        allow=given.get("allow"),
    )
    first = options["what"] if "what" in options else options["workload"]
    profile = first if isinstance(first, Profile) else options.get("profiled")
    if all(options.get(name) in OPEN for name in GOALS):
        options |= _goal(base, first)
    for name in OPTIONS:
        if options.get(name) in (None, ()) and getattr(base, name) not in (None, ()):
            options[name] = getattr(base, name)
    if base.allow and options.get("allow") != []:  # nothing at all was asked for by []
        options["allow"] = base.allow
    if accumulates and options.get("accumulate") is None and base.accumulate is not None:
        options["accumulate"] = base.accumulate
    elif not accumulates:
        _check_accumulate(base, profile)
    _tell_left_out(base, OF_A_TARGET if profile is None else (*OF_A_TARGET, *OF_A_PROFILE))
    return options


def _goal(base: Config, what: Workload | Profile) -> dict[str, Any]:
    """The goal of the configuration, as a verb takes it."""
    if base.utilization is not None:
        facts = what.device if isinstance(what, Profile) else device_facts(what.device)
        return {"budget": int(base.utilization * facts.capacity_bytes)}
    if base.activation_reduction is not None:
        return {"budget": None, "activation_reduction": base.activation_reduction}
    return {} if base.budget is None else {"budget": base.budget}


def _check_accumulate(base: Config, profile: Profile | None) -> None:
    """Refuse batches per optimizer step that the profile to plan for has not."""
    batches = 1 if profile is None else profile.accumulate
    if base.accumulate not in (None, batches):
        raise UsageError(
            f"accumulate is {base.accumulate}, and the step is profiled with {batches}",
            hint=f"give profiled=memfit.profile(workload, accumulate={base.accumulate})",
        )


def _refuse_targets(config: Config) -> None:
    """Refuse a configuration that says what to build; a preset only proposes it."""
    found = [f"{n}={v!r}" for n in OF_A_TARGET if (v := getattr(config, n)) is not None]
    if found:
        raise UsageError(
            f"the configuration says {', '.join(found)}, and the workload is built already",
            hint="leave that out, and build the workload so; on the command line, where a target "
            "is built, it has its effect",
        )


def _tell_left_out(base: Config, names: tuple[str, ...]) -> None:
    fields = {name: getattr(base, name) for name in names}
    said = [f"{name}={value!r}" for name, value in fields.items() if value not in (None, ())]
    if said:
        log.warning("%s left out: the workload or its profile has its own", ", ".join(said))
