"""Put a plan to work on a model, and take it off again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import torch

from memfit.errors import PlanFileError, UsageError
from memfit.ir.plan import Plan
from memfit.ir.plan_check import fault_in
from memfit.measure.memory import Peak
from memfit.measure.switches import switched_off
from memfit.runtime.calls import Engine, Route, Router, Wrap, named_modules
from memfit.runtime.compile.compiled import compiled_segments
from memfit.runtime.compile.padding import remember
from memfit.runtime.cuda_graphs import CudaGraphs
from memfit.runtime.inplace import inplace_off
from memfit.runtime.layout import channels_last
from memfit.runtime.recompute import Recompute
from memfit.runtime.reversible import Stacked
from memfit.runtime.setup import Setup
from memfit.runtime.signature import batch_signature, model_signature
from memfit.runtime.swap.arena import Arena
from memfit.runtime.swap.attach import arena_for, swap_around
from memfit.runtime.swap.engine import Swap
from memfit.workload import Workload, refuse_compiled, unwrap

# Models that a plan is at work on, with that plan.
_planned: WeakKeyDictionary[torch.nn.Module, Plan] = WeakKeyDictionary()


class Applied(Stacked):
    """A plan at work. A context manager: leaving it restores the model."""

    def __init__(self, plan: Plan, model: torch.nn.Module, setup: Setup | None = None) -> None:
        """`setup` goes to work before the plan, and is taken off after it."""
        self.plan = plan
        self.model = model
        self.setup = setup
        self.recompute: Recompute | None = None  # what repeats forwards, once the plan was at work
        self.swap: Swap | None = None  # what moves memory to the host, once the plan was at work
        self._stack: ExitStack | None = None
        self._arena: Arena | None = None  # kept when the plan is taken off: pinning takes seconds
        self.router: Router | None = None
        self.graphs = CudaGraphs(model) if plan.cuda_graphs else None

    @property
    def copies_in_flight(self) -> int:
        """Copies to the host and back that are under way now; the device is not waited for."""
        return 0 if self.swap is None else self.swap.copies_in_flight

    def _make(self, stack: ExitStack) -> None:
        """Start executing the plan."""
        refuse_planned(self.model)
        _planned[unwrap(self.model)] = self.plan
        stack.callback(_planned.pop, unwrap(self.model), None)
        code = plan_code(self.plan)
        self.recompute = self.recompute or plan_engine(self.plan, self.model)
        engine: Engine = self.recompute
        if self.setup is not None:
            stack.enter_context(self.setup)
        if self.plan.host_bytes:
            engine = self._swap(engine)
            stack.callback(engine.close)
        stack.enter_context(switched_off(self.model))
        stack.enter_context(adjusted(self.model, self.plan))
        route = Route(self.plan.route, self.plan.model_calls, self.plan.calls_at_work)
        given = None if self.swap is None else self.swap.keep
        self.router = Router(self.model, route, engine, code, given)
        stack.callback(setattr, self, "router", None)
        stack.callback(self.router.uninstall)
        self.router.install()
        if self.graphs is not None:
            stack.enter_context(self.graphs.at_work(self.router.skip_model))

    @property
    def hidden_bytes(self) -> int:
        """What is in use within a step and counts as free to the allocator."""
        return 0 if self.graphs is None else self.graphs.hidden_bytes

    def whole(self, peak: Peak) -> Peak:
        """A peak that the allocator saw, with what was hidden from it."""
        return replace(peak, bytes=peak.bytes + self.hidden_bytes)

    @property
    def lacks_room(self) -> bool:
        """Whether it was not launched as CUDA graphs for want of memory."""
        return self.graphs is not None and self.graphs.no_room

    def release(self) -> None:
        """Give memory back that outlives the plan's being at work."""
        if self.graphs is not None:
            self.graphs.release()

    def _swap(self, engine: Engine) -> Swap:
        if self.swap is None:
            self._arena = arena_for(self.plan, self.model)
            self.swap = swap_around(engine, self.plan, self.model, self._arena)
        return self.swap


def release_all(*plans: Applied | None) -> None:
    """The same for several; None is a step without a plan."""
    for applied in plans:
        if applied is not None:
            applied.release()


@contextmanager
def adjusted(model: torch.nn.Module, plan: Plan) -> Iterator[None]:
    """The model as it was when it was profiled for the plan."""
    with inplace_off(model, plan.inplace_off), channels_last(model, plan.channels_last):
        yield


def plan_engine(plan: Plan, model: torch.nn.Module) -> Recompute:
    """The engine that recomputes the plan's runs."""
    modules = named_modules(model, [s.module for s in plan.segments])
    segments = plan.segments
    return Recompute(
        plan.runs,
        {i: modules[s.module] for i, s in enumerate(segments)},
        {i: s.mutated_buffers for i, s in enumerate(segments) if s.mutated_buffers},
        trim=plan.trim and next(model.parameters()).is_cuda,
        compiled={i for i, s in enumerate(segments) if s.variant is not None},
    )


def plan_code(plan: Plan) -> dict[int, Wrap]:
    """What runs in the place of each captured call's forward."""
    code: dict[int, Wrap] = {}
    remember(plan.padded)
    for index, segment in enumerate(plan.segments):
        if segment.variant is not None:
            variant = plan.variants[segment.variant]
            saved = None if variant.unplanned else variant.saved
            compiled = compiled_segments(plan.executor)
            code[index] = partial(
                compiled.bind,
                key=variant.graph,
                saved=saved,
                mutated_buffers=segment.mutated_buffers,
            )
    return code


def refuse_planned(model: torch.nn.Module) -> None:
    """UsageError when a plan is at work in the model: another would measure and run that one."""
    model = unwrap(model)
    here = type(model).__name__
    mine = set(model.modules())
    for planned, plan in list(_planned.items()):
        there = type(planned).__name__
        shared = {name for name, module in planned.named_modules() if module in mine}
        if planned is model:
            where = f"this {here} already"
        elif model in set(planned.modules()):
            where = f"the {there} that this {here} is a part of"
        elif planned in mine:
            where = f"a part of this {here}, a {there}"
        elif any(s.module in shared for s in plan.segments):
            where = f"a {there} that shares segments with this {here}"
        else:
            continue
        raise UsageError(
            f"a plan is at work on {where}",
            hint="take it off first: fitted.undo(), or leave the block of memfit.apply",
        )


def check_plan(plan: Plan, model: torch.nn.Module) -> None:
    """Refuse a plan that was made for another model or another torch, and a compiled model.

    One that was changed since it was made is refused, too, where that cannot be run.
    """
    refuse_compiled(model)
    if (fault := fault_in(plan)) is not None:
        raise PlanFileError(
            f"the plan cannot be run: {fault}",
            hint="it was changed since it was made: make a new one with memfit.plan",
        )
    if plan.fingerprint != model_signature(model):
        here = f"{type(unwrap(model)).__name__}"
        raise PlanFileError(
            f"the plan was made for {plan.workload.get('model', 'another model')}, "
            f"not for this {here}: modules or parameter shapes differ",
            hint="make a plan for this model: memfit plan TARGET --budget B -o plan.json",
        )
    if plan.torch.split("+")[0] != torch.__version__.split("+")[0]:
        raise PlanFileError(
            f"the plan was made with torch {plan.torch}, this is torch {torch.__version__}",
            hint="other versions use memory differently: make the plan again",
        )


def check_plan_for(plan: Plan, workload: Workload) -> None:
    """Refuse a plan for another model, torch, batch or optimizer."""
    check_plan(plan, workload.model)
    for part, here in (
        ("batch", batch_signature(workload.batch)),
        ("optimizer", type(workload.optimizer).__name__),
        ("device", workload.device.type),
    ):
        if plan.workload.get(part) != here:
            raise PlanFileError(
                f"the plan was made for the {part} {plan.workload.get(part)!r}, not {here!r}",
                hint="make a plan for this workload: memfit plan TARGET --budget B -o plan.json",
            )
