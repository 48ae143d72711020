"""Steps that are run one by one, from an idle device to an idle device, with marks inside."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from memfit.errors import UsageError
from memfit.fitted import Fitted
from memfit.measure.step import run_step
from memfit.measure.timing import Clock
from memfit.observe.marks import Marks, Shares
from memfit.runtime.calls import Route
from memfit.runtime.signature import batch_signature, is_no_larger
from memfit.runtime.split import parts_of
from memfit.workload import Workload


@dataclass
class TimedSteps:
    """How one step is run, and what was seen of those that counted.

    `train(batch, marks)` trains on a batch; a step takes `batches_per_step` of them.
    """

    workload: Workload
    route: Route
    train: Callable[[Any, Marks], None]
    loader: Iterable[Any] | None
    batches_per_step: int = 1
    walls: list[float] = field(default_factory=list)
    shares: list[Shares] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = Clock(self.workload.device)
        self.marks = Marks(self.clock)
        self._batches = None if self.loader is None else _endless(self.loader)

    def run(self, *, counts: bool) -> None:
        """Run a step, and read its clocks if it counts."""
        with self.marks.around(self.workload.model, self.route):
            self.clock.settle()
            self.marks.begin()
            start = time.perf_counter()
            for _ in range(self.batches_per_step):
                self.train(self._next(), self.marks)
            self.marks.phase("end")
            self.clock.settle()
            wall = time.perf_counter() - start
        if counts:
            self.walls.append(wall)
            self.shares.append(self.marks.read())

    @property
    def middle(self) -> list[int]:
        """The middle half of the steps by their length: their means add up, as medians do not."""
        order = sorted(range(len(self.walls)), key=self.walls.__getitem__)
        cut = len(order) // 4
        return order[cut : len(order) - cut]

    def step_s(self) -> float:
        """Seconds of a step by the host's clock."""
        return fmean(self.walls[number] for number in self.middle)

    def seconds(self, component: str, segment: int | None = None) -> float:
        """Seconds of a component: of one segment, or of all and what lies outside."""
        totals = []
        for number in self.middle:
            shares = self.shares[number].items()
            totals.append(sum(s for (c, i), s in shares if c == component and segment in (None, i)))
        return fmean(totals)

    def _next(self) -> Any:
        self.marks.phase("end" if self._batches is None else "loader")
        batch = self.workload.batch if self._batches is None else next(self._batches)
        self.marks.phase("end")
        return batch


def plain_steps(workload: Workload, loader: Iterable[Any] | None, route: Route) -> TimedSteps:
    """Steps of a workload as what is at work around its model runs them."""
    each = copy.copy(workload)  # which gets another batch for every step

    def train(batch: Any, marks: Marks) -> None:
        each.batch = batch
        run_step(each, phase=marks.phase)

    return TimedSteps(workload, route, train, loader)


def fitted_steps(
    fitted: Fitted, loader: Iterable[Any] | None, *, inside: bool = True
) -> TimedSteps:
    """Steps of a fitted workload, as many batches each as the optimizer waits for.

    Where the plan runs a batch in parts, the times of all parts add up. Calls of segments are
    marked, unless nothing is to be seen `inside` of the model.
    """
    plan = fitted.plan

    def train(batch: Any, marks: Marks) -> None:
        parts = parts_of(batch, plan.split)
        if not all(is_no_larger(part, fitted.workload.batch) for part in parts):
            raise UsageError(
                f"the batch {batch_signature(batch)} is larger than what was planned for, "
                f"{batch_signature(fitted.example)}, or unlike it",
                hint="time batches of the planned shape",
            )
        fitted.on_phase = marks.phase
        try:
            fitted.step(batch)
        finally:
            fitted.on_phase = None

    route = Route(plan.route if inside else [], plan.model_calls)
    group = fitted.profile.accumulate // plan.split
    return TimedSteps(replace(fitted.workload, batch=fitted.example), route, train, loader, group)


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise UsageError(
                "the loader has no batch, or none left",
                hint="give a loader that can be gone through again, such as a list or a DataLoader",
            )
