"""The verbs of memfit: profile, plan, apply, fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memfit.attempts import hold_whole_step, plan_whole_step
from memfit.capture.compilable import profile_compilable
from memfit.config import Config
from memfit.errors import InfeasibleError, NumbersWarning, UsageError
from memfit.fitted import Fitted
from memfit.holding import Held
from memfit.ir.plan import Plan
from memfit.ir.profile import Profile
from memfit.measure.cuda_allocator import prefer_expandable_segments
from memfit.measure.device import device_facts
from memfit.measure.garbage import only_new_garbage
from memfit.measure.kept_copies import reused
from memfit.measure.ran_out import Stages, told_how_far
from memfit.planning.budget import check_budget_text, resolve_budget
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.techniques import (
    MICROBATCH,
    STEP,
    check_device,
    forced_techniques,
    last_resort,
    techniques_for,
    without,
)
from memfit.proof import prove
from memfit.runtime.apply import Applied, check_plan, check_plan_for, refuse_planned
from memfit.runtime.setup import Setup
from memfit.runtime.signature import describe
from memfit.runtime.split import part_of
from memfit.runtime.swap.host_memory import default_host_budget
from memfit.starting import started
from memfit.units import format_bytes, parse_bytes
from memfit.verify.references import check_references, measure_references
from memfit.whole_step import Measure, Whole, beside
from memfit.workload import LossFn, Workload

Progress = Callable[[str], None]
EXECUTORS = ("graph", "inductor", "module")


@only_new_garbage()
def profile(
    workload: Workload,
    *,
    segments: Sequence[str] | None = None,
    executor: str | None = None,
    channels_last: bool | None = None,
    accumulate: int = 1,
    setup: Setup | None = None,
    cuda_graphs: bool | None = False,
    progress: Progress | None = None,
) -> Profile:
    """Measure one step of the workload: memory, seconds, segments. Leaves it as it was.

    A `setup` (techniques of the loss and the optimizer) is at work meanwhile. With
    `channels_last` the model is given its images in that layout; None: where compiled code works
    in it. With `cuda_graphs` the step is launched as such where it can be; None: where the device
    waits for the host.
    """
    if cuda_graphs and workload.device.type != "cuda":
        raise UsageError(
            f"cuda_graphs is asked for, and there are none on a {workload.device.type}",
            hint="leave it out, or move the workload to a CUDA device",
        )
    chosen = resolve_executor(executor, workload.device)
    return _profiled(
        workload,
        segments=segments,
        executor=chosen,
        turned=channels_last,
        accumulate=accumulate,
        setup=setup,
        cuda_graphs=cuda_graphs,
        progress=progress,
    )


def _profiled(workload: Workload, **options: Any) -> Profile:
    note = prefer_expandable_segments(workload.device)
    return _noting(profile_compilable(workload, **options), note)


def _noting(profile: Profile, note: str | None) -> Profile:
    """The profile with a note, unless it has it."""
    if note is None or note in profile.notes:
        return profile
    return replace(profile, notes=(*profile.notes, note))


@started
def plan(
    what: Workload | Profile,
    budget: str | int | None = None,
    *,
    strategy: str = "optimal",
    allow: str | Sequence[str] | None = None,
    force: Sequence[str] = (),
    host_budget: str | int | None = None,
    max_slowdown: float | None = None,
    activation_reduction: float | None = None,
    interval: int | None = None,
    segments: Sequence[str] | None = None,
    executor: str | None = None,
    min_tensor_bytes: str | int = 0,
    profiled: Profile | None = None,
    preset: str | None = None,
    config: Config | str | Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Find the fastest way to run the step within `budget` bytes.

    Techniques of the loss and the optimizer need the Workload, of which `profiled` may be given.

    Without `allow` it recomputes, and where that cannot hold the budget all other exact techniques
    are tried. `activation_reduction=0.40` asks for 40 % less activation memory instead of a budget.
    What is not given comes from `config`, a file such as "mine.toml" or a `memfit.config.Config`,
    and then from `preset`, such as "balanced"; "+name" in `allow` adds to their techniques.
    InfeasibleError names the smallest possible budget and what stands in the way.
    """
    if budget is not None:
        facts = what.device if isinstance(what, Profile) else device_facts(what.device)
        check_budget_text(budget, facts)
    goal = _goal(
        strategy,
        allow,
        force,
        host_budget,
        what.device.type,
        max_slowdown=max_slowdown,
        activation_reduction=activation_reduction,
        interval=interval,
        min_tensor_bytes=parse_bytes(min_tensor_bytes),
    )
    base = what if isinstance(what, Profile) else profiled
    if base is None:
        assert isinstance(what, Workload)
        base = profile(what, segments=segments, executor=executor, progress=progress)
    if budget is None and activation_reduction is None and strategy == "optimal":
        budget = "auto"
    resolved = None if budget is None else resolve_budget(budget, base)
    goal = replace(goal, budget_bytes=resolved)
    if isinstance(what, Profile):
        tried = [t for t in (*STEP, MICROBATCH) if t in goal.techniques]
        if not tried:
            return make_plan(base, goal)
        raise UsageError(
            f"{', '.join(tried)}: tried by running the step, and here is only its profile",
            hint="give memfit.plan the Workload, or leave them out",
        )
    return plan_whole_step(what, base, goal, _measuring(what, base, segments, progress))


def apply(plan: Plan, model: torch.nn.Module, optimizer: Any = None) -> Applied:
    """Execute a plan in the user's own loop: `with memfit.apply(plan, model): ...`.

    Backward and the optimizer stay the user's; leaving the block restores the model. A plan that
    keeps optimizer state on the host needs the optimizer. On CUDA the allocator is set as `fit`
    sets it, unless the environment says otherwise.
    """
    check_plan(plan, model)
    for parameter in model.parameters():
        prefer_expandable_segments(parameter.device)  # the allocator that the plan was made for
        break
    if plan.split > 1:
        raise UsageError(
            f"the plan runs a batch in {plan.split} parts, and here the loop gives whole ones",
            hint="train by memfit.fit(...).step(batch), or plan without microbatch",
        )
    if "step_in_backward" in plan.setup:
        raise UsageError(
            "the plan steps the optimizer in backward, and here backward is the loop's own",
            hint="train by memfit.fit(...).step(batch), which clips, accumulates and scales, too, "
            "or plan without step_in_backward, such as by allow='recompute'",
        )
    modules = [segment.module for segment in plan.segments]
    setup = None
    if plan.setup:
        sizes = plan.tile_bytes, plan.state_kept_bytes
        setup = Setup(plan.setup, model, optimizer, modules, *sizes)
    return Applied(plan, model, setup)


def fit(
    model: torch.nn.Module,
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    budget: str | int | None = "auto",
    *,
    name: str | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **options: Any,
) -> Fitted:
    """Profile, plan, run and verify; return a step that holds the budget.

    Options are those of `fit_workload`; `preset="balanced"` or `config="mine.toml"` is where it
    starts from, and what is given beside them goes first.
    """
    workload = Workload(model, loss_fn, optimizer, batch, name=name, scaler=scaler)
    return fit_workload(workload, budget, **options)


@started
@reused()
@only_new_garbage()
def fit_workload(
    workload: Workload,
    budget: str | int | None = "auto",
    *,
    plan: Plan | None = None,
    profiled: Profile | None = None,
    steps: int = 10,
    strategy: str = "optimal",
    allow: str | Sequence[str] | None = None,
    force: Sequence[str] = (),
    host_budget: str | int | None = None,
    max_slowdown: float | None = None,
    activation_reduction: float | None = None,
    interval: int | None = None,
    segments: Sequence[str] | None = None,
    executor: str | None = None,
    min_tensor_bytes: str | int = 0,
    accumulate: int = 1,
    cuda_graphs: bool | None = False,
    references: Sequence[str] = (),
    preset: str | None = None,
    config: Config | str | Path | None = None,
    progress: Progress | None = None,
) -> Fitted:
    """Like `fit`, for a Workload; `plan` executes a given plan instead of making one.

    `preset` and `config` are as in `memfit.plan`; a budget of "auto" leaves it to them. Their
    batch, seq, dtype and optimizer are left out, as a warning says: the workload has its own.

    `profiled` is a profile of this very workload, if there is one; a set-up that was at work then
    is at work again, and no other is tried. `steps` are timed. `accumulate` is how many batches
    each optimizer step will see; `cuda_graphs` is as in `profile`. Of the `references` "eager" and
    "compiled" (the whole step by torch.compile) those named are measured beside the plan. The
    model, the optimizer and the RNG are as before when it returns; only the plan is at work.
    """
    say = Stages.of(progress)
    check_references(references)
    if activation_reduction is not None and budget == "auto":
        budget = None
    if budget is not None:
        check_budget_text(budget, device_facts(workload.device))
    goal = _goal(
        strategy,
        allow,
        force,
        host_budget,
        workload.device.type,
        max_slowdown=max_slowdown,
        activation_reduction=activation_reduction,
        interval=interval,
        min_tensor_bytes=parse_bytes(min_tensor_bytes),
    )
    if plan is not None:
        check_plan_for(plan, part_of(workload, plan.split))
        executor, cuda_graphs = plan.executor, plan.cuda_graphs
    if accumulate < 1:
        raise UsageError(f"accumulate is {accumulate}", hint="it counts batches: 1 or more")
    if steps < 1:
        raise UsageError(f"steps is {steps}", hint="it counts timed steps: 1 or more")
    refuse_planned(workload.model)
    if profiled is not None:  # in another process, it may be: placement is predicted for this
        profiled = _noting(profiled, prefer_expandable_segments(workload.device))
    base = profiled or profile(
        workload,
        segments=segments,
        executor=executor,
        channels_last=None if plan is None else plan.channels_last,
        accumulate=accumulate,
        cuda_graphs=cuda_graphs,
        progress=say,
    )
    if base.workload != describe(workload) or base.accumulate != accumulate:
        raise UsageError(
            f"the profile is of {base.workload['model']} on {base.workload['batch']}, "
            f"accumulate={base.accumulate}: not of this workload",
            hint="profile this workload, or leave `profiled` out",
        )

    def held_from(base: Profile, goal: Goal) -> tuple[Whole, Held]:
        if plan is None and budget is not None:
            goal = replace(goal, budget_bytes=resolve_budget(budget, base))
        measure = _measuring(workload, base, segments, say)
        try:
            with told_how_far(workload, say, base):
                return hold_whole_step(workload, base, goal, plan, measure, say)
        except InfeasibleError as refusal:
            refusal.learned = refusal.learned or base
            raise

    # Layers by themselves were our choice: inside of compiled blocks there is more to decide.
    layers = executor in (None, "auto") and base.executor == "module"
    graphs = base.cuda_graphs
    otherwise = profiled is None and plan is None and (layers or graphs)
    try:
        whole, held = held_from(base, replace(goal, last_resort=()) if otherwise else goal)
    except InfeasibleError:
        if not otherwise:
            raise
        say("not by its layers: trying compiled segments" if layers else "not as CUDA graphs")
        base = _profiled(
            workload,
            segments=segments,
            executor="inductor" if layers else base.executor,
            named=not layers,
            accumulate=accumulate,
            progress=say,
        )
        whole, held = held_from(base, goal)
    setup, part = whole.setup, part_of(workload, whole.split)
    measured, made = held.profile, held.plan
    made = beside(base, made, whole.choices) if plan is None else made
    planned = Applied(made, workload.model, setup)
    with told_how_far(workload, say, base):
        result = prove(workload, planned, base, held, steps=steps, force=goal.force, say=say)
    beside_it = measure_references(
        workload, part, planned, references, steps=steps, accumulate=accumulate, say=say
    )
    result = replace(result, references=beside_it)
    if not result.numerics.kept:
        warnings.warn(
            f"{workload.name or 'the step'} holds its budget, but its numbers are not those of the "
            "plain step: see `result.numerics`, and `undo()` takes the plan off",
            NumbersWarning,
            stacklevel=3,
        )

    def replan(larger: Workload) -> Fitted:
        parts = accumulate * made.split
        return fit_workload(
            larger,
            made.budget_bytes,
            steps=1,
            strategy=goal.strategy,
            allow=without(allow, MICROBATCH),  # the batch is a part already
            host_budget=goal.host_bytes,
            max_slowdown=max_slowdown,
            interval=interval,
            segments=segments,
            min_tensor_bytes=min_tensor_bytes,
            accumulate=parts,
            profiled=profile(
                larger,
                segments=segments,
                executor=measured.executor,
                channels_last=measured.channels_last,
                accumulate=parts,
                cuda_graphs=cuda_graphs,
            ),
        )

    installed = planned.install()
    return Fitted(part, installed, measured, result, replan, accumulate, base, workload.batch)


def _measuring(
    workload: Workload, base: Profile, segments: Sequence[str] | None, progress: Progress | None
) -> Measure:
    """Profiles the workload as `base` was, with a set-up at work, or the batch in parts: once."""
    say = progress or (lambda text: None)
    known: dict[tuple[Any, int], Profile] = {}

    def measure(setup: Setup | None, split: int) -> Profile:
        key = (() if setup is None else setup.what), split
        if key not in known:
            known[key] = measured(setup, split)
        return known[key]

    def measured(setup: Setup | None, split: int) -> Profile:
        what = [] if setup is None else [*setup.techniques]
        what += [f"{split} parts"] if split > 1 else []
        if setup is not None and setup.state_kept_bytes:
            what.append(f"{format_bytes(setup.state_kept_bytes)} of the state kept")
        say(f"trying {', '.join(what)}")
        found = profile(
            part_of(workload, split),
            segments=segments,
            executor=base.executor,
            channels_last=base.channels_last,
            accumulate=base.accumulate * split,
            setup=setup,
            cuda_graphs=False,
        )
        return replace(found, split=split)

    return measure


def resolve_executor(name: str | None, device: torch.device) -> str | None:
    """The executor of this name; None: the profile says by which a step is run on CUDA."""
    check_device(device.type)
    if name is None or name == "auto":
        return None if device.type == "cuda" else "graph"
    if name not in EXECUTORS:
        raise UsageError(f"unknown executor {name!r}", hint=f"one of: {', '.join(EXECUTORS)}")
    return name


def _goal(
    strategy: str,
    allow: str | Sequence[str] | None,
    force: Sequence[str],
    host_budget: str | int | None,
    device_type: str,
    **limits: Any,
) -> Goal:
    """The goal with these limits and the techniques that a plan may use there."""
    techniques = techniques_for(strategy, allow, device_type)
    more = last_resort(strategy, allow, device_type)
    host_bytes = None
    if "offload" in (*techniques, *more):
        host_bytes = default_host_budget() if host_budget is None else parse_bytes(host_budget)
        if host_bytes < 0:
            raise UsageError(
                f"host_budget is {host_bytes}, below 0",
                hint='it is memory on the host: "16GiB", or a whole number of bytes',
            )
    elif host_budget is not None:
        raise UsageError(
            "host_budget is given, but nothing may be moved to the host",
            hint="allow it: allow='+offload' (--allow +offload)",
        )
    return Goal(
        strategy=strategy if techniques else "none",
        techniques=techniques,
        last_resort=more,
        host_bytes=host_bytes,
        force=forced_techniques(force, techniques),
        **limits,
    )
