"""Put an engine around the segments' forwards, and take it away again.

An engine decides how one call of a segment runs; `routed` makes sure it is asked for every wanted
call in the step, with the number the call has in the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, Protocol

import torch

from memfit.errors import PlanFileError
from memfit.ir.step_graph import LOSS
from memfit.runtime.loss_calls import expect_loss, loss_calls, loss_module
from memfit.workload import unwrap

Forward = Callable[..., Any]
Wrap = Callable[[Forward], Forward]  # a module's forward -> the code that runs in its place


@dataclass(frozen=True)
class Route:
    """The segment calls of a step: module, which of its calls, how many it has in the step.

    `model_calls` is how often the step calls the model itself. Only `wanted` calls (None: all)
    come to an engine.
    """

    calls: Sequence[tuple[str, int, int]]
    model_calls: int = 1
    wanted: Collection[int] | None = None


class Engine(Protocol):
    """Runs the forward of segment call `index`; all calls of a step lie between begin and end."""

    @property
    def replaying(self) -> bool: ...

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def __call__(self, index: int, forward: Forward, args: Any, kwargs: Any) -> Any: ...


class Direct:
    """An engine that only calls."""

    replaying = False

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def __call__(self, index: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs)


class _Replacement:
    """What runs in the place of a module's forward. Copies of the module, and files it is saved to,
    have its own again: what stands here knows the original, and would run that."""

    def __init__(self, module: torch.nn.Module, own: Forward | None, function: Forward) -> None:
        update_wrapper(self, module.forward)  # its signature: some code asks for it
        self._module, self._own, self._function = module, own, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        if self._own is not None:
            return _itself, (self._own,)
        return getattr, (self._module, "forward")  # of the copy: its class has one


def _itself(value: Any) -> Any:
    return value


@contextmanager
def replaced_forward(module: torch.nn.Module, wrap: Wrap) -> Iterator[None]:
    """Run `wrap(forward)` in the place of the module's forward until the block is left."""
    own = module.__dict__.get("forward")
    replacement = _Replacement(module, own, wrap(module.forward))
    module.forward = replacement  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if own is not None:
            module.forward = own  # type: ignore[method-assign]
        else:
            del module.forward


def named_modules(model: torch.nn.Module, names: Iterable[str]) -> dict[str, torch.nn.Module]:
    """The modules of these names, LOSS among them; PlanFileError when the model has not got one."""
    model = unwrap(model)
    modules = {**dict(model.named_modules()), LOSS: loss_module(model)}
    missing = [name for name in names if name not in modules]
    if missing:
        raise PlanFileError(
            f"the model has no module {missing[0]!r}, which the plan names",
            hint="the plan was made for another model: make a new one with memfit.plan",
        )
    return {name: modules[name] for name in names}


class Router:
    """Knows which call of the step a module's forward is, and hands it to the engine."""

    def __init__(
        self,
        model: torch.nn.Module,
        route: Route,
        engine: Engine,
        code: Mapping[int, Wrap] | None = None,
        inputs: Callable[[Any], None] | None = None,
    ) -> None:
        """`inputs` is shown the arguments of every call of the model itself."""
        self.model = unwrap(model)
        self.engine = engine
        self._inputs = inputs
        self._code = code or {}
        self._wanted = range(len(route.calls)) if route.wanted is None else route.wanted
        self._indices: dict[str, dict[int, int]] = {}
        self._visits: dict[str, int] = {}
        for index, (module, number, visits) in enumerate(route.calls):
            if index in self._wanted or index in self._code:
                self._indices.setdefault(module, {})[number] = index
                self._visits[module] = visits
        self._seen: dict[str, int] = {}
        self._model_calls = route.model_calls
        self._model_seen = 0
        self._losses_left = 0  # segments that are losses and still to come in the step
        self._losses_after = 0  # of these, after the model
        self._model_returned = False
        self._evaluating = False
        self._undo: list[Any] = []

    def begin(self) -> None:
        """Count calls from the start of a step again."""
        self._seen.clear()
        self._model_seen = 0
        self._losses_left = self._visits.get(LOSS, 0) if torch.is_grad_enabled() else 0
        self._model_returned = False
        self.engine.begin()

    def install(self) -> None:
        """Replace the forwards of the segments' modules, and of the model to see steps begin.

        A module with no wanted call and no code for any is left as it is.
        """
        for name, module in named_modules(self.model, self._indices).items():
            self._change(replaced_forward(module, partial(self._segment, name)))
        self._change(replaced_forward(self.model, self._root))
        if LOSS in self._indices:
            self._change(loss_calls(self.model))

    def uninstall(self) -> None:
        """Put every forward back as it was."""
        while self._undo:
            self._undo.pop().__exit__(None, None, None)
        self.begin()

    def _change(self, change: AbstractContextManager[None]) -> None:
        change.__enter__()
        self._undo.append(change)

    def _segment(self, name: str, forward: Forward) -> Forward:
        indices, visits = self._indices[name], self._visits[name]
        bound = {i: self._code[i](forward) for i in indices.values() if i in self._code}
        wanted = self._wanted

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.engine.replaying or self._evaluating:
                return forward(*args, **kwargs)
            if name == LOSS and not self._losses_left:  # of something else than the step
                return forward(*args, **kwargs)
            number = self._seen.get(name, 0)
            self._seen[name] = number + 1
            index = indices.get(number % visits)
            if index is None:  # nobody's, or it lies inside another segment
                output = forward(*args, **kwargs)
            elif index in wanted:
                output = self.engine(index, bound.get(index, forward), args, kwargs)
            else:
                output = bound[index](*args, **kwargs)
            if name == LOSS:
                self._losses_left -= 1
                self._end_if_over()
            return output

        return call

    def _root(self, forward: Forward) -> Forward:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not (torch.is_grad_enabled() or self.model.training):
                return self._evaluate(forward, args, kwargs)
            if self._model_seen % self._model_calls == 0:
                self.begin()
            self._model_seen += 1
            expect_loss(self.model)
            if self._inputs is not None:
                self._inputs((args, kwargs))
            try:
                output = forward(*args, **kwargs)
            except BaseException:
                self.begin()
                raise
            self._model_returns()
            return output

        return call

    def skip_model(self) -> None:
        """Count a call of the model that something else did in the place of its forward."""
        self.begin()
        self._model_seen += 1
        self._losses_left = self._losses_after
        expect_loss(self.model)
        self._model_returns()

    def _model_returns(self) -> None:
        self._losses_after = self._losses_left
        self._model_returned = self._model_seen % self._model_calls == 0
        self._end_if_over()

    def _end_if_over(self) -> None:
        """The step's forward is over when the model and all losses that are segments returned."""
        if self._model_returned and not self._losses_left:
            self._model_returned = False
            self.engine.end()

    def _evaluate(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run a forward that is no part of a step: it must not count as one of its calls."""
        self._evaluating = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._evaluating = False


@contextmanager
def routed(
    model: torch.nn.Module, route: Route, engine: Engine, code: Mapping[int, Wrap] | None = None
) -> Iterator[Router]:
    """Route the wanted segment calls of `model` through `engine` until the block is left.

    `code` says for some calls what runs in the place of their module's forward.
    """
    router = Router(model, route, engine, code)
    try:
        router.install()
        yield router
    finally:
        router.uninstall()
