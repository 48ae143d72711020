"""A workload of fake tensors: shapes and storages without memory, whatever the model's size."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)

from memfit.errors import ModelError, UsageError
from memfit.estimating.values import Values
from memfit.targets import resolve_target
from memfit.workload import Workload

What = Workload | str | Callable[[], Workload]


@dataclass(frozen=True)
class Fakes:
    """The mode in which every tensor is a fake one, and the values that are known of them."""

    mode: FakeTensorMode
    values: Values


@contextmanager
def without_memory(what: What) -> Iterator[Fakes]:
    """Make every tensor a fake one inside; the mode is that of `what` where it has one."""
    mode = None
    if isinstance(what, Workload):
        first = next(what.model.parameters())
        mode = first.fake_mode if isinstance(first, FakeTensor) else None
    with mode or _mode_for_building() as entered, Values() as values:
        yield Fakes(entered, values)


def _mode_for_building() -> FakeTensorMode:
    """A mode in which `Module.to` and its kin work.

    They swap fake parameters, and torch swaps no tensor that has a weak reference. The mode would
    keep one to all it makes first: https://github.com/pytorch/pytorch/pull/184976.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.fake_tensor_converter.set_tensor_memo = lambda t, v: None  # type: ignore[method-assign]
    return mode


def check_what(what: What, options: Mapping[str, Any]) -> None:
    """Raise UsageError for what is no workload and makes none, and for unknown options."""
    if not isinstance(what, (Workload, str)) and not callable(what):
        raise UsageError(
            f"a {type(what).__name__} cannot be estimated",
            hint='give a memfit.Workload, a target such as "encoder", or a function that builds a '
            "workload",
        )
    known = [name for name in inspect.signature(resolve_target).parameters if name != "target"]
    if isinstance(what, str) and (unknown := [name for name in options if name not in known]):
        raise UsageError(
            f"a target has no option {unknown[0]!r}", hint=f"one of: {', '.join(known)}"
        )


def fake_workload(what: What, fakes: Fakes, options: Mapping[str, Any]) -> Workload:
    """Return `what` on fake tensors: a target or a function's result built so, or a copy.

    A workload that is fake already keeps its tensors. None has a GradScaler: whether one skips a
    step follows from what is in the gradients, which nobody knows here, and a step that is skipped
    has no optimizer state. All it has itself are single numbers.
    """
    return replace(_fake_workload(what, fakes, options), scaler=None)


def _fake_workload(what: What, fakes: Fakes, options: Mapping[str, Any]) -> Workload:
    if isinstance(what, str):
        with fakes.values.building():
            return resolve_target(what, **options)
    if options:
        raise UsageError(
            f"{', '.join(options)} can be given with a target's name only",
            hint="build the workload with them",
        )
    if not isinstance(what, Workload):
        with fakes.values.building():
            made: Any = what()
        if not isinstance(made, Workload):
            raise UsageError(
                f"the function returned a {type(made).__name__}, not a memfit.Workload",
                hint="end it with `return memfit.Workload(model, loss_fn, optimizer, batch)`",
            )
        return made
    if isinstance(next(what.model.parameters()), FakeTensor):
        return what
    if what.device.type == "meta":
        raise UsageError(
            "the workload is on the meta device, which has no autocast and no CUDA operators",
            hint="give the function that builds it on the CPU: inside, that takes no memory",
        )
    with FakeCopyMode(fakes.mode):
        model, optimizer, batch = copy.deepcopy((what.model, what.optimizer, what.batch))
    return Workload(model, what.loss_fn, optimizer, batch, name=what.name)


@contextmanager
def unnoticed_by_transformers() -> Iterator[None]:
    """Let transformers treat fake tensors as real ones: else it never leaves out a causal mask."""
    module = sys.modules.get("transformers.masking_utils")
    before = getattr(module, "is_tracing", None)
    if module is None or before is None:
        yield
        return
    module.is_tracing = lambda tensor=None: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.is_tracing = before  # type: ignore[attr-defined]


@contextmanager
def refused_without_data(workload: Workload) -> Iterator[None]:
    """Turn the error of a step whose shapes follow from its data into one that says so."""
    try:
        yield
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise ModelError(
            f"the step of {workload.name or 'the workload'} cannot be estimated: what {error.func} "
            "gives has a shape that depends on the data",
            hint="measure it instead: memfit profile TARGET",
        ) from error
