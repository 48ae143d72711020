"""Run a plan once to learn how the variants it chose really do, as compiled.

Operators fuse, reuse memory and overlap, so what was reckoned from single operators is corrected:
memory by recording each chosen variant in a step, seconds by timing the planned step against the
unplanned one. Limits: one factor corrects the seconds of all variants that ran together, and of
graphs none of which did.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from memfit.capture.discover import dropped_saved_tensors
from memfit.capture.last_pass import last_pass, mark_pass
from memfit.capture.recording import Marking, watched
from memfit.errors import ModelError
from memfit.ir.joint_graph import JointGraph, Span, Variant
from memfit.ir.plan import Plan, SegmentPlan
from memfit.ir.profile import Measurements, Profile
from memfit.measure.allocations import Event, record
from memfit.measure.step import drop_gradients, is_out_of_memory, run_step, untouched
from memfit.measure.timing import STEADY, Inside, time_apart, time_interleaved
from memfit.runtime.apply import Applied, adjusted, plan_code, plan_engine, release_all
from memfit.runtime.calls import Direct, Route, routed
from memfit.runtime.compile.compiled import compiled_segments
from memfit.runtime.setup import Setup
from memfit.workload import Workload

log = logging.getLogger(__name__)
ROUNDS = 7  # where times vary
# How far off reckoned seconds usually are, as a share of themselves: a measurement less certain
# than that changes little.
USUAL_ERROR = 0.5
SMALLEST_FACTOR, LARGEST_FACTOR = 0.25, 4.0
MARGINAL = 0.005  # of a step: new variants that take less are not timed once others were


def learn_variants(
    workload: Workload,
    profile: Profile,
    plan: Plan,
    setup: Setup | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Profile | None:
    """The profile with what the plan's variants showed; None when there is nothing new in them.

    A `setup` is at work meanwhile; what goes on is told to `say`.
    """
    plan = plan.resident()  # copies are known already: this is about variants
    chosen = _chosen(profile, plan)
    if not chosen:
        return None
    say("putting the state aside")
    try:
        # What is recorded is each variant's own memory, whatever lies beside it.
        with untouched(workload, unmeasured=True), setup or nullcontext():
            say("compiling what was chosen")
            if len(chosen) > 1:
                _compile_ahead(workload, plan)
            seen = _recorded(workload, profile, plan, chosen, say)
            ratio = 1.0
            if not _is_marginal(profile, plan, chosen):
                say("timing what was chosen")
                ratio = _seconds_ratio(workload, profile, plan)
            say("putting the state back")
    except (RuntimeError, ModelError) as error:
        if not is_out_of_memory(error):
            raise
        log.info("the plan's first run went out of memory: its variants were not measured")
        drop_gradients(workload)
        return None
    known = list(profile.known or (Measurements(),) * len(profile.graphs))
    for (graph, saved), variant in seen.items():
        before = known[graph]
        reckoned = max(chosen[graph, saved].recompute_s, 0.0)
        learned = replace(variant, seconds=reckoned * ratio, measured=True)
        others = tuple(v for v in before.variants if v.saved != saved)
        known[graph] = replace(before, variants=(*others, learned))
    known = [replace(m, factor=m.factor * ratio) for m in known]
    return replace(profile, known=tuple(known))


def _chosen(profile: Profile, plan: Plan) -> dict[tuple[int, tuple[int, ...]], SegmentPlan]:
    """The variants of the plan that were not measured yet, each with a segment that runs by it."""
    numbers = {graph.key: i for i, graph in enumerate(profile.graphs)}
    known = {
        (i, variant.saved)
        for i, seen in enumerate(profile.known)
        for variant in seen.variants
        if variant.measured
    }
    found: dict[tuple[int, tuple[int, ...]], SegmentPlan] = {}
    for segment in plan.segments:
        if segment.variant is None or plan.variants[segment.variant].unplanned:
            continue
        planned = plan.variants[segment.variant]
        graph = profile.graphs[numbers[planned.graph]]
        saved = tuple(sorted(graph.index[name] for name in planned.saved))
        if (numbers[planned.graph], saved) not in known:
            found.setdefault((numbers[planned.graph], saved), segment)
    return found


def _is_marginal(
    profile: Profile, plan: Plan, chosen: dict[tuple[int, tuple[int, ...]], SegmentPlan]
) -> bool:
    """Whether all that is new beside variants that were timed takes next to no time."""
    new = {segment.variant for segment in chosen.values()}
    new_s = sum(s.recompute_s for s in plan.segments if s.variant in new)
    return bool(profile.known) and new_s <= MARGINAL * profile.step_s


def _seconds_ratio(workload: Workload, profile: Profile, plan: Plan) -> float:
    """Measured over reckoned seconds that the plan's variants add to the step."""
    if profile.baseline is None:
        return 1.0
    # Giving pages back costs both steps when they run in turn: it is not what is asked here.
    planned = Applied(replace(plan, trim=False), workload.model)
    unplanned = Applied(plan.unplanned(), workload.model)

    step = partial(run_step, workload, accumulate=profile.accumulate)
    works = {
        "planned": Inside(lambda: planned, step),
        "unplanned": Inside(lambda: unplanned, step),
    }
    how: dict[str, Any] = {"rounds": ROUNDS, "limit_s": 20, "steady": STEADY}
    if plan.cuda_graphs:
        release = partial(release_all, planned, unplanned)
        times = time_apart(works, workload.device, release, warmup=3, **how)
    else:
        times = time_interleaved(works, workload.device, **how)
    with_plan, without = times["planned"], times["unplanned"]
    reckoned_s = profile.passes * sum(
        s.recompute_s for s in plan.segments if s.decision == "partial"
    )
    trim_s = profile.trim_s if plan.trim else 0.0
    whole_s = max(plan.predicted.step_s - plan.baseline_step_s - reckoned_s - trim_s, 0.0)
    measured_s = with_plan.median_s - without.median_s - whole_s
    # A median of n samples is off by about 1.25 deviations / sqrt(n); spreads are 0.67 of one.
    rounds = len(without.samples)
    error_s = 1.9 * math.hypot(with_plan.spread_s, without.spread_s) / math.sqrt(rounds)
    return weighed(reckoned_s, measured_s, error_s)


def weighed(reckoned_s: float, measured_s: float, error_s: float) -> float:
    """The factor between reckoned and measured seconds, near 1 where the measurement is unsure."""
    if reckoned_s <= 0:
        return 1.0
    certainty = (USUAL_ERROR * reckoned_s) ** 2
    trust = certainty / (certainty + error_s**2)
    factor = 1 + trust * (measured_s / reckoned_s - 1)
    return min(max(factor, SMALLEST_FACTOR), LARGEST_FACTOR)


def _compile_ahead(workload: Workload, plan: Plan) -> None:
    """Have the plan's variants compiled side by side, in a forward that keeps nothing."""
    compiled = compiled_segments(plan.executor)
    if not compiled.worker_count:
        return
    route = Route(plan.route, plan.model_calls)
    with (
        adjusted(workload.model, plan),
        routed(workload.model, route, Direct(), plan_code(plan)),
        dropped_saved_tensors(lambda tensor: None),
        compiled.ahead(),
    ):
        try:
            workload.compute_loss()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            log.info("no room for operators one by one: what is left is compiled when it runs")


def _recorded(
    workload: Workload,
    profile: Profile,
    plan: Plan,
    chosen: dict[tuple[int, tuple[int, ...]], SegmentPlan],
    say: Callable[[str], None],
) -> dict[tuple[int, tuple[int, ...]], Variant]:
    """Each chosen variant with the memory it took in one recorded step."""
    code = plan_code(plan)
    engine = Marking(plan_engine(plan, workload.model), code)
    route = Route(plan.route, plan.model_calls)
    with ExitStack() as stack:
        stack.enter_context(adjusted(workload.model, plan))
        stack.enter_context(routed(workload.model, route, engine, code))
        run_step(workload)  # compiles
        say("recording what was chosen")
        run_step(workload)
        stack.enter_context(watched(compiled_segments(plan.executor), engine))
        step = partial(run_step, workload, phase=partial(_mark_pass, workload))
        events, _ = last_pass(record(step, workload.device))
    index = {segment.name: i for i, segment in enumerate(plan.segments)}
    traces = read_traces(events, {index[s.name] for s in chosen.values()})
    return {
        (number, saved): traces[index[segment.name]].variant(profile.graphs[number], saved)
        for (number, saved), segment in chosen.items()
    }


def _mark_pass(workload: Workload, phase: str) -> None:
    if phase == "forward":
        mark_pass(workload)


@dataclass
class Trace:
    """The allocations of one captured call: (address, bytes), bytes negative when freed."""

    forward: list[tuple[int, int]] = field(default_factory=list)
    backward: list[tuple[int, int]] = field(default_factory=list)
    nodes: dict[str, int] = field(default_factory=dict)  # input and output nodes -> address

    def variant(self, graph: JointGraph, saved: tuple[int, ...]) -> Variant:
        """The variant that keeps `saved`, with its memory as traced."""
        given = frozenset(saved)
        outputs = {self.nodes.get(graph.nodes[n].name, -1) for n in graph.outputs}
        forward, kept = _spans(self.forward, {}, 0)
        held = {a: number for a, number in kept.items() if a not in outputs}
        there = {a: forward[n] for a, n in held.items()}
        backward, _ = _spans(self.backward, there, len(forward))
        at_start = sum(span.bytes for span in backward if span.birth == -1)
        return Variant(
            saved=saved,
            recomputed=graph.recomputed(given),
            held_bytes=sum(forward[n].bytes for n in held.values()),
            seconds=0.0,
            forward_peak_bytes=_peak(forward),
            backward_peak_bytes=max(_peak(backward) - at_start, 0),
            forward=tuple(forward),
            backward=tuple(backward),
        )


def read_traces(events: Sequence[Event], calls: set[int]) -> dict[int, Trace]:
    """What happened inside the forwards and backwards of these calls."""
    traces = {call: Trace() for call in calls}
    forward = backward = None
    for event in events:
        if event.kind == "mark":
            word, *rest = event.label.split()
            if word == "enter":
                forward = int(rest[0])
            elif word == "exit":
                forward = None
            elif word == "backward_begin":
                backward = int(rest[0])
            elif word == "backward_end":
                backward = None
            elif word == "node" and int(rest[0]) in traces:
                traces[int(rest[0])].nodes[rest[2]] = int(rest[1])
            continue
        change = (event.address, event.bytes if event.kind == "alloc" else -event.bytes)
        if forward in traces:
            traces[forward].forward.append(change)
        elif backward in traces:
            traces[backward].backward.append(change)
    return traces


def _spans(
    changes: Sequence[tuple[int, int]], there: dict[int, Span], first: int
) -> tuple[list[Span], dict[int, int]]:
    """Spans of a pass, and by address the numbers of those alive when it ends.

    `there` are those alive when it begins; other memory freed in the pass (a tangent) was, too.
    New storages are numbered from `first` on, so that both passes together name each once.
    """
    spans = [Span(span.storage, span.bytes, -1, -1) for span in there.values()]
    alive = dict(zip(there, range(len(spans)), strict=True))
    for time, (address, size) in enumerate(changes):
        if size > 0:
            alive[address] = len(spans)
            spans.append(Span(first + len(spans), size, time, -1))
        elif address in alive:
            number = alive.pop(address)
            spans[number] = replace(spans[number], death=time)
        else:
            spans.append(Span(-1, -size, -1, time))
    return spans, alive


def _peak(spans: Sequence[Span]) -> int:
    """The most bytes alive at once."""
    length = max((max(s.birth, s.death) for s in spans), default=0) + 2
    change = [0] * (length + 1)
    for span in spans:
        change[max(span.birth, 0)] += span.bytes
        change[span.death if span.death >= 0 else length] -= span.bytes
    highest = live = 0
    for step in change:
        live += step
        highest = max(highest, live)
    return highest
