"""torch.compile, whole or block by block; with activation_memory_budget, or as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

from memfit.bench.systems.prepared import (
    Prepared,
    Setting,
    around,
    block_names,
    total_static,
)
from memfit.measure.memory import Peak
from memfit.measure.step import run_step
from memfit.measure.timing import Inside
from memfit.runtime.calls import Forward, replaced_forward
from memfit.runtime.compile.whole import compiled_whole as whole_step_compiled
from memfit.runtime.compile.whole import own_code
from memfit.workload import Workload


def prepare(setting: Setting, family: str, argument: str) -> Prepared:
    """The model compiled, whole ("compile") or block by block ("blocks")."""
    if argument == "graphs":
        graphed = compiled_whole(setting.workload, nullcontext, mode="reduce-overhead")
        return replace(graphed, seen=_all_reserved)
    budget = float(argument) if argument else None
    if family == "blocks":
        return compiled_blocks(setting.workload, block_names(setting.workload), budget)
    return compiled_whole(setting.workload, lambda: memory_budget(budget))


def compiled_whole(
    workload: Workload,
    context: Callable[[], AbstractContextManager[Any]],
    mode: str | None = None,
) -> Prepared:
    """Loss and model compiled as one; `context` stands around every step, compiling included."""

    whole = whole_step_compiled(workload, mode)
    return Prepared(Inside(context, partial(run_step, whole)), partial(total_static, workload))


def compiled_blocks(
    workload: Workload, names: Sequence[str], budget: float | None, *, again: bool = False
) -> Prepared:
    """Blocks compiled one by one, and recomputed whole in backward if `again`."""
    compiled: Any = torch.compile(own_code(_call_forward), dynamic=False)

    def wrap(forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            return compiled(forward, args, kwargs)

        return checkpointed(run) if again else run

    @contextmanager
    def at_work() -> Iterator[None]:
        with memory_budget(budget), replaced(workload.model, names, wrap):
            yield

    return around(workload, at_work)


def _all_reserved(peak: Peak) -> Peak:
    """What lies in the memory of graphs the allocator counts as free between steps."""
    return replace(peak, bytes=peak.reserved_bytes)


def checkpointed(forward: Forward) -> Forward:
    """The forward, run again in backward instead of keeping what it makes."""
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


@contextmanager
def replaced(
    model: torch.nn.Module, names: Sequence[str], wrap: Callable[[Forward], Forward]
) -> Iterator[None]:
    """Other code in the place of these modules' forwards."""
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(replaced_forward(modules[name], wrap))
        yield


def memory_budget(budget: float | None) -> AbstractContextManager[Any]:
    """What is compiled inside keeps this share of what it would save; None: as torch does."""
    if budget is None:
        return nullcontext()
    return functorch_config.patch(activation_memory_budget=budget)


def _call_forward(forward: Any, args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)
