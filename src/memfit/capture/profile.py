"""Profile a workload: find its segments, record its step, time it, and leave it as it was."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch

from memfit.capture.build import build_step_graph
from memfit.capture.captured import Captured, capture_segments
from memfit.capture.copied import with_copies
from memfit.capture.find import find_segments
from memfit.capture.lines import with_lines
from memfit.capture.recording import record_forward, record_step
from memfit.capture.seconds import StepTimes, recomputing_all
from memfit.capture.usual import surely_compiled, usual_executor
from memfit.errors import DeviceMemoryError
from memfit.ir.profile import AllocatorStart, Baseline, Profile
from memfit.ir.step_graph import StepGraph
from memfit.measure.cuda_allocator import allocator_start, settle_optimizer_state
from memfit.measure.device import device_facts
from memfit.measure.memory import Peak, static_bytes
from memfit.measure.ran_out import Stages, first_words, told_how_far
from memfit.measure.step import explained_errors, run_first_steps, untouched
from memfit.measure.switches import switch_notes
from memfit.runtime.apply import refuse_planned
from memfit.runtime.compile import padding
from memfit.runtime.compile.ahead import wake_inductor
from memfit.runtime.inplace import inplace_off
from memfit.runtime.layout import channels_last, prefers_channels_last
from memfit.runtime.optimizer.in_backward.train import looks_first
from memfit.runtime.setup import Setup
from memfit.runtime.signature import describe, model_signature
from memfit.runtime.swap.rates import swap_rates
from memfit.workload import Workload, refuse_compiled

Progress = Callable[[str], None]

BY_LAYERS = (
    "run by its layers: the host could not keep up with compiled code, unless it is launched as "
    "CUDA graphs (--cuda-graphs, cuda_graphs=True)"
)


def profile_workload(
    workload: Workload,
    *,
    segments: Sequence[str] | None = None,
    executor: str | None = "module",
    turned: bool | None = None,
    accumulate: int = 1,
    rounds: int = 5,
    setup: Setup | None = None,
    cuda_graphs: bool | None = False,
    progress: Progress | None = None,
) -> Profile:
    """Measure one step of the workload; its model, optimizer and RNG are as before afterwards.

    A `setup` is at work meanwhile. The `executor` None is one that serves the workload on CUDA.
    Images are `turned` around to have their channels last; None: where compiled code wants them so.
    The step is launched as `cuda_graphs`; None: where the host holds it up.
    """
    say = Stages.of(progress)
    refuse_compiled(workload.model)
    refuse_planned(workload.model)
    if surely_compiled(workload, executor):
        wake_inductor()
    say("measuring copies to the host")
    copy = swap_rates(workload.device)
    switched = switch_notes(workload.model)
    say("putting the state aside")
    with untouched(workload), setup or nullcontext(), told_how_far(workload, say):
        in_backward = setup is not None and setup.in_backward is not None
        looks = in_backward and accumulate == 1 and looks_first(None, workload.scaler)
        say("finding segments")
        if turned is None:
            turned = executor in (None, "inductor") and prefers_channels_last(workload)
        graphs = cuda_graphs if setup is None else False  # its hooks are Python
        asked = executor
        executor = asked or usual_executor(
            workload, convolutions=turned, cuda_graphs=graphs is not False
        )
        turn = partial(channels_last, workload.model, turned)
        with turn():
            # By single operators a loss takes what it takes in the plain step: nothing to plan.
            found, inplace = find_segments(workload, segments, loss=executor == "inductor")
        with inplace_off(workload.model, inplace), turn():
            say("capturing segments")
            captured = capture_segments(workload, found, executor)
            say("warming up")
            _warm_up(workload, captured)
            gc.collect()  # else garbage counts as memory that is there all along
            settle_optimizer_state(workload.optimizer, workload.device, values=False)
            allocator = allocator_start(workload.device)
            static = static_bytes(workload)
            say("recording memory")
            graph = build_step_graph(
                record_forward(workload, captured),
                record_step(workload, captured, 2 if in_backward and accumulate > 1 else 1),
                captured,
                static,
            )
            graph = with_lines(graph, captured.modules(workload.model))
            say("timing segments")
            times = StepTimes(workload, captured, graph, accumulate, graphs, looks)
            seconds = times.measure(rounds)
        say("putting the state back")
        peak = times.plain_peak
        if peak is not None and times.graphed_peak is not None:
            graph, allocator = _beside_graphs(graph, allocator, peak, times.graphed_peak)
            peak = times.graphed_peak
        notes = [f"{name}: in-place work switched off to recompute it" for name in inplace]
        notes += switched
        notes += [] if times.no_plain is None else [times.no_plain]
        if cuda_graphs and times.graphed_peak is None:
            why = times.no_graphs or "there is a set-up at work"
            notes.append(f"not launched as CUDA graphs: {why}")
        if asked is None and executor == "module" and cuda_graphs is False and setup is None:
            notes.append(BY_LAYERS)
        notes += ["images are given to the model with their channels last"] if turned else []
        if copy is None:
            notes.append("no room to measure copies to the host: nothing can be moved there")
    return Profile(
        fingerprint=model_signature(workload.model),
        workload=describe(workload),
        device=device_facts(workload.device),
        graph=graph,
        call_times=seconds.calls,
        step_s=seconds.step_s,
        host_slack_s=seconds.host_slack_s,
        between_s=seconds.between_s,
        trim_s=seconds.trim_s,
        baseline=(
            None if peak is None else Baseline(peak.bytes, peak.reserved_bytes, seconds.step_s)
        ),
        copy=copy,
        allocator=allocator,
        executor=executor,
        graphs=with_copies(captured.graphs, graph),
        uncaptured={graph.calls[i].name: why for i, why in captured.reasons.items()},
        inplace_off=inplace,
        channels_last=turned,
        cuda_graphs=times.graphed_peak is not None,
        padded=padding.decisions() if executor == "inductor" else {},
        accumulate=accumulate,
        looks_first=looks,
        setup=() if setup is None else setup.techniques,
        tile_bytes=None if setup is None else setup.tile_bytes,
        state_kept_bytes=0 if setup is None else setup.state_kept_bytes,
        notes=tuple(notes),
    )


def _beside_graphs(
    graph: StepGraph, allocator: AllocatorStart | None, plain: Peak, graphed: Peak
) -> tuple[StepGraph, AllocatorStart | None]:
    """The step with what is there at once when its memory is kept: inputs, the optimizer's."""
    more = max(graphed.bytes - plain.bytes, 0)
    graph = replace(graph, static=graph.static | {"beside CUDA graphs": more})
    if allocator is not None:
        more = max(graphed.reserved_bytes - plain.reserved_bytes, 0)
        allocator = replace(allocator, reserved_bytes=allocator.reserved_bytes + more)
    return graph, allocator


def _warm_up(workload: Workload, captured: Captured) -> None:
    """Two steps with everything recomputed: optimizer state and library workspaces exist then."""
    try:
        with recomputing_all(workload, captured), explained_errors(workload):
            run_first_steps(workload)
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            "the step runs out of memory even with every segment recomputed: " + first_words(error),
            hint="use a smaller batch or sequence, bf16, or a smaller model",
        ) from error
