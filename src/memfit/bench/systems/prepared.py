"""What a system gives a cell: a step that is ready to run, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from memfit import api
from memfit.bench.systems.shared_profiles import Found, SharedProfiles
from memfit.capture.find import find_segments
from memfit.measure.memory import Peak, static_bytes
from memfit.measure.step import run_step
from memfit.measure.timing import Inside
from memfit.workload import Workload

Step = Callable[[], Any]
Progress = Callable[[str], None]


class Unavailable(Exception):
    """A system that is not installed, or cannot run this workload; the message says which."""


@dataclass(frozen=True)
class Setting:
    """What every system is given: the workload, how often to time it, and where to tell."""

    workload: Workload
    steps: int
    say: Progress
    shared: SharedProfiles = field(default_factory=SharedProfiles)

    def profile(self, executor: str | None = None, *, graphs: bool = False) -> Found:
        """The workload's profile, another cell's where there is one.

        With `graphs` its step is launched as CUDA graphs, where the host holds it up.
        """
        how = (executor, graphs)
        found = self.shared.find(self.workload, how)
        if found is not None:
            self.say(f"using the profile of {found.by}")
            return found
        made = api.profile(
            self.workload,
            executor=executor,
            cuda_graphs=None if graphs else False,
            progress=self.say,
        )
        self.shared.keep(made, how)
        return Found(self.shared.system, made)


@dataclass(frozen=True)
class Prepared:
    """A step to warm up, to measure and to time; `static` are the bytes it finds on a CPU.

    `apart` steps give pages back that the step after them would miss: they are not timed in turn.
    `seen` is a peak with what the allocator did not see added. `facts` are fields of the cell that
    only the system knows.
    """

    step: Step
    static: Callable[[], int]
    apart: bool = False
    seen: Callable[[Peak], Peak] = lambda peak: peak
    facts: dict[str, Any] = field(default_factory=dict)


def around(workload: Workload, context: Callable[[], AbstractContextManager[Any]]) -> Prepared:
    """The workload's own step inside a context, which is entered and left unseen by the clock."""
    return Prepared(Inside(context, partial(run_step, workload)), partial(total_static, workload))


def total_static(workload: Workload) -> int:
    """All bytes there before a step."""
    return sum(static_bytes(workload).values())


def block_names(workload: Workload) -> list[str]:
    """The modules that people checkpoint and compile one by one, in calling order.

    Those that change their own input in place are left out: nothing may repeat them.
    """
    segments, _ = find_segments(workload)
    chosen = [s for s in segments if not s.visit.leaf and s.pinned is None]
    if not chosen:
        raise Unavailable("the model has no blocks: only single layers, or changed in place")
    return list(dict.fromkeys(segment.visit.module for segment in chosen))
