"""A profile by compiled code, or of the operators one by one where no code can be made."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memfit.capture.profile import profile_workload
from memfit.ir.profile import Profile
from memfit.runtime.compile.choice import CannotCompile
from memfit.workload import Workload

log = logging.getLogger(__name__)
INSTEAD = "graph"  # the same segments and graphs, and needs no compiler


def profile_compilable(
    workload: Workload,
    *,
    executor: str | None = None,
    named: bool | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Profile:
    """The profile that `profile_workload` makes; where nobody named an executor and this machine
    makes no code, one by `graph` with a note of the reason.

    CannotCompile where an executor was `named`: where one is given, unless it is said otherwise.
    """
    try:
        return profile_workload(workload, executor=executor, progress=progress, **options)
    except CannotCompile as error:
        if executor is not None if named is None else named:
            raise
        note = f"run by {INSTEAD}, not compiled: {error.reason}"
    log.warning("%s", note)  # outside of the except block what the failed run held is free
    found = profile_workload(workload, executor=INSTEAD, progress=progress, **options)
    return replace(found, notes=(*found.notes, note))
