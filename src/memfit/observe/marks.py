"""Moments of a step in order, and the seconds between them, each given to one component.

Every interval between two marks belongs to one component and to at most one segment, so the
components add up to the whole by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from memfit.measure.timing import Clock
from memfit.runtime.calls import Forward, Route, Wrap, named_modules, replaced_forward

OUTSIDE = -1  # the segment of what lies outside all segments
# What a mark says: a phase begins; a segment's forward begins or is over; its backward begins; a
# segment is repeated or that is over.
PHASE, ENTER, EXIT, GRADIENT, REPEAT, REPEATED = range(6)


class Mark(NamedTuple):
    """One moment; `about` is a phase's name or a segment's number."""

    kind: int
    about: Any
    moment: Any


Seconds = Callable[[Any, Any], float]
Shares = dict[tuple[str, int], float]  # (component, segment) -> seconds


def add_up(marks: Sequence[Mark], seconds: Seconds) -> Shares:
    """Give each interval between marks to its component and segment."""
    shares: Shares = {}
    phase, segment = "other", OUTSIDE
    repeating: list[int] = []
    for mark, following in pairwise(marks):
        if mark.kind == PHASE:
            phase, segment, repeating = mark.about, OUTSIDE, []
        elif mark.kind in (ENTER, GRADIENT):
            segment = mark.about
        elif mark.kind == EXIT:
            segment = OUTSIDE
        elif mark.kind == REPEAT:
            repeating.append(mark.about)
        elif repeating:
            repeating.pop()
        key = ("recompute", repeating[-1]) if repeating else (phase, segment)
        shares[key] = shares.get(key, 0.0) + seconds(mark.moment, following.moment)
    return shares


class Marks:
    """Takes the marks of steps, one after the other; also an observer of replays."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: list[Mark] = []
        self._phase = "other"
        self._seen: dict[str, int] = {}

    def begin(self) -> None:
        """Forget the step before."""
        self._marks, self._seen, self._phase = [], {}, "other"

    def phase(self, name: str) -> None:
        """A phase begins, or the optimizer's "end"."""
        self._phase = "other" if name == "end" else name
        self._mark(PHASE, self._phase)

    def read(self) -> Shares:
        """Seconds by component and segment since `begin`; the device must have passed them all."""
        return add_up(self._marks, self._clock.seconds)

    @contextmanager
    def around(self, model: torch.nn.Module, route: Route) -> Iterator[None]:
        """Mark the segment calls of a model; they have their number in the route."""
        with ExitStack() as stack:
            names = dict.fromkeys(module for module, _, _ in route.calls)
            for name, module in named_modules(model, names).items():
                stack.enter_context(replaced_forward(module, self._marked(name, route)))
            yield

    def _marked(self, name: str, route: Route) -> Wrap:
        calls = {n: i for i, (module, n, _) in enumerate(route.calls) if module == name}
        visits = next(visits for module, _, visits in route.calls if module == name)

        def wrap(forward: Forward) -> Forward:
            def call(*args: Any, **kwargs: Any) -> Any:
                if self._phase == "backward":  # a checkpoint of the model's own repeats it
                    index = next(iter(calls.values()))
                    return self._run(REPEAT, REPEATED, index, forward, args, kwargs)
                number = self._seen.get(name, 0)
                self._seen[name] = number + 1
                found = calls.get(number % visits)
                if found is None or self._phase != "forward":
                    return forward(*args, **kwargs)
                output = self._run(ENTER, EXIT, found, forward, args, kwargs)
                self._watch_backward(found, output)
                return output

            return call

        return wrap

    def _run(
        self, before: int, after: int, index: int, forward: Forward, args: Any, kwargs: Any
    ) -> Any:
        self._mark(before, index)
        try:
            return forward(*args, **kwargs)
        finally:
            self._mark(after, index)

    def _watch_backward(self, index: int, output: Any) -> None:
        """Mark when the gradient of the call's output arrives."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self._mark(GRADIENT, index))
                return

    def _mark(self, kind: int, about: Any) -> None:
        self._marks.append(Mark(kind, about, self._clock.now()))

    def replay_begins(self, run: tuple[int, int]) -> None:
        """A run of segments is about to be repeated."""
        self._mark(REPEAT, run[0])

    def replay_ends(self, run: tuple[int, int]) -> None:
        """It was."""
        self._mark(REPEATED, run[0])

    def replay_enters(self, index: int) -> None:
        """One segment of the run is repeated."""
        self._mark(REPEAT, index)

    def replay_exits(self, index: int) -> None:
        """It was."""
        self._mark(REPEATED, index)

    def run_is_done(self, run: tuple[int, int]) -> None:
        """Not of interest here."""

    def run_saved(self, run: tuple[int, int], holders: list[Any]) -> None:
        """Not of interest here."""

    def bookkeeping(self, index: int, begins: bool) -> None:
        """Not of interest here."""
