"""Running out of memory: how far the work came and what was live, taken down where it happens."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from traceback import walk_stack, walk_tb
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.errors import DeviceMemoryError, ModelError
from memfit.ir.ended import OutOfMemory, Stage
from memfit.measure.census import live_tensors
from memfit.measure.device import device_facts
from memfit.measure.step import is_out_of_memory
from memfit.workload import Workload, unwrap

_BACKWARD = (torch.Tensor.backward.__code__, torch.autograd.backward.__code__)


class Stages:
    """Says what is being done, and keeps it for whoever asks how far the work came."""

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say
        self._begun: list[tuple[str, float]] = []

    @staticmethod
    def of(progress: Callable[[str], None] | None) -> Stages:
        """These, if they are some already."""
        return progress if isinstance(progress, Stages) else Stages(progress)

    def __call__(self, text: str) -> None:
        self._begun.append((text, time.perf_counter()))
        if self._say is not None:
            self._say(text)

    def so_far(self) -> tuple[Stage, ...]:
        """Every stage until now, the one under way included."""
        moments = [*(begun for _, begun in self._begun), time.perf_counter()]
        seconds = (end - begun for begun, end in pairwise(moments))
        return tuple(map(Stage, (text for text, _ in self._begun), seconds))


@contextmanager
def told_how_far(workload: Workload, stages: Stages, learned: Any = None) -> Iterator[None]:
    """Turn running out of memory into a DeviceMemoryError that says how far the work came.

    Where that is known already, the stages around it are added. `learned` is a profile, if there is
    one.
    """
    try:
        yield
    except DeviceMemoryError as error:
        if error.ended is None:
            ended = ended_by(error, workload, stages)
            raise _explained(error.message, error.hint, ended, learned) from error.__cause__
        error.ended = replace(error.ended, stages=(*stages.so_far(), *error.ended.stages))
        error.learned = error.learned or learned
        raise
    except (RuntimeError, MemoryError, ModelError) as error:
        if not (isinstance(error, MemoryError) or is_out_of_memory(error)):
            raise
        ended = ended_by(error, workload, stages)
        said = f"out of memory: {first_words(error)}"
        raise _explained(said, None, ended, learned) from error


def _explained(said: str, hint: str | None, ended: OutOfMemory, learned: Any) -> DeviceMemoryError:
    hint = hint or "use a smaller batch or sequence, bf16, or a smaller model"
    explained = DeviceMemoryError(f"{said}. {ended.words}", hint=hint)
    explained.ended, explained.learned = ended, learned
    return explained


def first_words(error: BaseException) -> str:
    """What an allocator says first: that there is no memory, and how much was asked for."""
    return ". ".join(str(error).strip().partition("\n")[0].split(". ")[:2]).rstrip(".")


def ended_by(error: BaseException, workload: Workload, stages: Stages) -> OutOfMemory:
    """How far the work came and what is live, as long as the error is being handled."""
    device, model = workload.device, unwrap(workload.model)
    state = [leaf for s in workload.optimizer.state.values() for leaf in tree_leaves(s)]
    groups = (group["params"] for group in workload.optimizer.param_groups)
    parameters = [*model.parameters(), *(p for group in groups for p in group)]
    known = {  # a fit freezes what is there when it begins, and the census does not see that
        "parameters": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer state": [leaf for leaf in state if isinstance(leaf, torch.Tensor)],
        "buffers": list(model.buffers()),
        "batch": workload.batch_tensors(),
    }
    kinds, largest = live_tensors(device, known)
    if device.type == "cuda":
        rest = torch.cuda.memory_allocated(device) - sum(kinds.values())
        kinds["saved for backward, workspaces"] = max(rest, 0)
    capacity = device_facts(device).capacity_bytes
    return OutOfMemory(
        stages.so_far(), place_in_step(error, model), kinds, tuple(largest), capacity
    )


def place_in_step(error: BaseException, model: torch.nn.Module) -> str:
    """The phase of the step and the innermost module in which an error was raised, in words.

    They are read off the frames it came through; code that was compiled has none. Frames that still
    run say nothing: whoever handles the error is one of them, and what is read of it would hold the
    error, and with it all that the step held, for as long as the garbage is not collected.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    names = {id(module): name for name, module in model.named_modules()}
    phase = module = ""
    running = {id(frame) for frame, _ in walk_stack(sys._getframe())}
    for frame, _ in walk_tb(error.__traceback__):
        if id(frame) in running:
            continue
        owner = frame.f_locals.get("self")
        if frame.f_code is Workload.compute_loss.__code__:
            phase = phase or "forward"
        elif frame.f_code in _BACKWARD:
            phase = "backward"
        elif isinstance(owner, torch.optim.Optimizer):
            phase, module = "the optimizer's step", ""
        elif isinstance(owner, torch.nn.Module) and id(owner) in names:
            module = names[id(owner)] or type(owner).__name__
    return " at ".join(filter(None, (phase, module)))
