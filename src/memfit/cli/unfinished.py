"""A fit that came to no result: what its run file says, and what a report of it shows."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from memfit import __version__
from memfit.errors import DeviceMemoryError, HostMemoryError, InfeasibleError, MemfitError
from memfit.ir.ended import INFEASIBLE, OUT_OF_MEMORY, NoResult
from memfit.ir.plan import Plan
from memfit.ir.profile import Profile
from memfit.ir.run_file import RunFile
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.write_plan import without_room
from memfit.report.run_report import EndedReport

if TYPE_CHECKING:
    from memfit.workload import Workload

WITHOUT_RESULT = (InfeasibleError, DeviceMemoryError, HostMemoryError)


def unfinished(error: MemfitError, target: str, workload: Workload | None) -> RunFile:
    """What there is to keep of a fit that ended by one of these errors; None: nothing was built."""
    from memfit.measure.device import device_facts
    from memfit.runtime.signature import describe

    refused = NoResult(
        INFEASIBLE if isinstance(error, InfeasibleError) else OUT_OF_MEMORY,
        error.message,
        error.hint,
        error.exit_code,
        workload={"name": target} if workload is None else describe(workload),
        device={} if workload is None else vars(device_facts(workload.device)),
    )
    if isinstance(error, InfeasibleError):
        refused = replace(
            refused,
            budget_bytes=error.budget_bytes,
            minimum_feasible_bytes=error.minimum_bytes,
            incompressible_bytes=error.incompressible_bytes,
            slowdown=error.slowdown,
        )
    if isinstance(error, DeviceMemoryError):
        refused = replace(refused, memory=error.ended)
    profile = None if isinstance(error, HostMemoryError) else getattr(error, "learned", None)
    command = shlex.join(["memfit", *sys.argv[1:]])
    return RunFile(None, None, profile, None, command, __version__, refused)


def nearest_plan(profile: Profile, refused: NoResult) -> Plan | None:
    """The plan that comes nearest to a budget which no plan holds, or the step as it is."""
    least = refused.minimum_feasible_bytes
    goals = [Goal(strategy="none")]
    goals = goals if least is None else [Goal(budget_bytes=least), *goals]
    for goal in goals:
        try:
            plan = make_plan(profile, goal)
        except InfeasibleError:
            continue
        if refused.verdict == INFEASIBLE:
            plan = replace(plan, segments=without_room(plan.segments))
        budget = refused.budget_bytes or plan.budget_bytes
        least = plan.minimum_feasible_bytes if least is None else least
        return replace(plan, budget_bytes=budget, minimum_feasible_bytes=least)
    return None


def ended_report(run: RunFile) -> EndedReport:
    """What a report shows of a fit without a profile."""
    assert run.refused is not None
    made = time.strftime("%Y-%m-%d %H:%M %z")
    return EndedReport(run.refused, "", made, __version__, run.command)
