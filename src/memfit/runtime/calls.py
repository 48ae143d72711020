"""Put an engine around the segments' forwards, and take it away again.

An engine decides how one call of a segment runs; `routed` makes sure it is asked for every call
in the step, with the number the call has in the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from memfit.errors import PlanFileError
from memfit.workload import unwrap

Forward = Callable[..., Any]
Route = Sequence[tuple[str, int, int]]  # module, which of its calls, how many calls in a step


class Engine(Protocol):
    """Runs the forward of segment call `index`; `begin` starts a new step."""

    @property
    def replaying(self) -> bool: ...

    def begin(self) -> None: ...

    def __call__(self, index: int, forward: Forward, args: Any, kwargs: Any) -> Any: ...


@contextmanager
def replaced_forward(module: torch.nn.Module, wrap: Callable[[Forward], Forward]) -> Iterator[None]:
    """Run `wrap(forward)` in the place of the module's forward until the block is left."""
    had = "forward" in module.__dict__
    before = module.__dict__.get("forward")
    module.forward = wrap(module.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if had:
            module.forward = before  # type: ignore[method-assign, assignment]
        else:
            del module.forward


class Router:
    """Knows which call of the step a module's forward is, and hands it to the engine."""

    def __init__(self, model: torch.nn.Module, route: Route, engine: Engine) -> None:
        self.model = unwrap(model)
        self.engine = engine
        self._indices: dict[str, dict[int, int]] = {}
        self._visits: dict[str, int] = {}
        for index, (module, number, visits) in enumerate(route):
            self._indices.setdefault(module, {})[number] = index
            self._visits[module] = visits
        self._seen: dict[str, int] = {}
        self._undo: list[Any] = []

    def begin(self) -> None:
        """Count calls from the start of a step again."""
        self._seen.clear()
        self.engine.begin()

    def install(self) -> None:
        """Replace the forwards of the segments' modules, and of the model to see steps begin."""
        modules = dict(self.model.named_modules())
        missing = [name for name in self._indices if name not in modules]
        if missing:
            raise PlanFileError(
                f"the model has no module named {missing[0]!r} (and {len(missing) - 1} more)",
                hint="the plan was made for another model: make a new one with memfit.plan",
            )
        for name in self._indices:
            self._replace(modules[name], lambda f, name=name: self._segment(name, f))
        self._replace(self.model, self._root)

    def uninstall(self) -> None:
        """Put every forward back as it was."""
        while self._undo:
            self._undo.pop().__exit__(None, None, None)
        self.begin()

    def _replace(self, module: torch.nn.Module, wrap: Callable[[Forward], Forward]) -> None:
        change = replaced_forward(module, wrap)
        change.__enter__()
        self._undo.append(change)

    def _segment(self, name: str, forward: Forward) -> Forward:
        indices, visits = self._indices[name], self._visits[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.engine.replaying:
                return forward(*args, **kwargs)
            number = self._seen.get(name, 0)
            self._seen[name] = number + 1
            index = indices.get(number % visits)
            if index is None:  # this call of the module lies inside another segment
                return forward(*args, **kwargs)
            return self.engine(index, forward, args, kwargs)

        return call

    def _root(self, forward: Forward) -> Forward:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.begin()
            return forward(*args, **kwargs)

        return call


@contextmanager
def routed(model: torch.nn.Module, route: Route, engine: Engine) -> Iterator[Router]:
    """Route every segment call of `model` through `engine` until the block is left."""
    router = Router(model, route, engine)
    try:
        router.install()
        yield router
    finally:
        router.uninstall()
