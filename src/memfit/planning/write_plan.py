"""A choice of acts written down as a Plan: a decision and a reason for every segment call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memfit.errors import PlanFileError
from memfit.ir.plan import KEEP, OFFLOAD, PARTIAL, RECOMPUTE, Plan, SegmentPlan, VariantPlan
from memfit.ir.step_graph import Call
from memfit.planning.acts import Act, Away, Pick, Send, calls_of
from memfit.planning.segment.decisions import block_activations, variant_plan
from memfit.planning.simulate import Simulator
from memfit.planning.strategies import saved_bytes
from memfit.units import format_bytes, format_seconds

HAS_ROOM = "kept: the budget has room"
NO_ROOM = "kept: nothing smaller was found"


def write_segments(
    simulator: Simulator, acts: Sequence[Act]
) -> tuple[tuple[SegmentPlan, ...], tuple[VariantPlan, ...]]:
    """The decision for every call, and the distinct variants that captured ones run by."""
    writer = _Writer(simulator, acts)
    segments = tuple(writer.segment(call) for call in simulator.graph.calls)
    return segments, tuple(writer.variants)


def without_room(segments: Sequence[SegmentPlan]) -> tuple[SegmentPlan, ...]:
    """The decisions of the plan that comes nearest to a budget which none holds."""
    return tuple(replace(s, reason=NO_ROOM) if s.reason == HAS_ROOM else s for s in segments)


def read_acts(simulator: Simulator, plan: Plan) -> tuple[Act, ...]:
    """The acts of a plan for this very step."""
    acts: list[Act] = list(plan.runs)
    for index, segment in enumerate(plan.segments):
        points = () if segment.release is None else (segment.release, segment.prefetch)
        if segment.decision == OFFLOAD and segment.variant is None:
            acts.append(Send(index, *points))
        elif segment.decision in (PARTIAL, OFFLOAD) and segment.variant is not None:
            number = simulator.graph.calls[index].graph
            graph, variant = simulator.profile.graphs[number], plan.variants[segment.variant]
            lost = {*variant.saved, *variant.offloaded} - graph.index.keys()
            if lost:
                raise PlanFileError(
                    f"the plan keeps {min(lost)!r} of a {variant.kind}, whose graph has no such "
                    f"tensor among its {len(graph.nodes)}",
                    hint="give files of one fit, or plan again: --budget B",
                )
            saved, moved = (
                [graph.index[n] for n in names] for names in (variant.saved, variant.offloaded)
            )
            acts.append(Pick(index, simulator.offer(number, saved, moved), *points))
    return tuple(acts)


class _Writer:
    def __init__(self, simulator: Simulator, acts: Sequence[Act]) -> None:
        self.simulator = simulator
        self.act_of = {call: act for act in acts for call in calls_of(act)}
        runs = [act for act in acts if isinstance(act, tuple)]
        self.run_number = {run: number for number, run in enumerate(runs)}
        self.variants: list[VariantPlan] = []
        self._numbers: dict[tuple[int, int], int] = {}

    def segment(self, call: Call) -> SegmentPlan:
        act = self.act_of.get(call.index)
        saved = saved_bytes(self.simulator, call.index)
        whole_s = self.simulator.profile.call_times[call.index].recompute_s
        number = self._variant(call, act)
        away = None if act is None else self.simulator.effect(act).away
        moved = 0 if away is None else self._moved_bytes(away, saved)
        smallest = 0
        if isinstance(act, Pick):
            variant = self.simulator.variant(act)
            unplanned = set(self.simulator.profile.graphs[call.graph].unplanned)
            seconds = self.simulator.recompute_seconds(act)
            decision = OFFLOAD if set(variant.saved) == unplanned else PARTIAL
            freed = 0 if decision == OFFLOAD else max(saved - variant.held_bytes - moved, 0)
            inside = f"frees {format_bytes(freed)} for {format_seconds(seconds)} inside"
            reason = " and ".join(([] if decision == OFFLOAD else [inside]) + self._sent(away))
        elif isinstance(act, Send):
            decision, seconds, freed = OFFLOAD, 0.0, 0
            smallest = self.simulator.smallest_move_bytes
            reason = self._sent(away)[0]
        elif act is not None:
            decision, seconds, freed = RECOMPUTE, whole_s, saved
            together = len(calls_of(act))
            reason = f"frees {format_bytes(saved)} for {format_seconds(seconds)}" + (
                f", in a run of {together}" if together > 1 else ""
            )
        else:
            decision, seconds, freed = KEEP, whole_s, 0
            reason = _why_kept(call)
        return SegmentPlan(
            name=call.name,
            module=call.module,
            number=call.number,
            visits=call.visits,
            kind=call.kind,
            decision=decision,
            saved_bytes=saved,
            recomputed_bytes=freed,
            offloaded_bytes=moved,
            recompute_s=seconds,
            reason=reason,
            run=self.run_number[act] if isinstance(act, tuple) else None,
            release=None if away is None else away.release,
            prefetch=None if away is None else away.prefetch,
            variant=number,
            uncaptured=self.simulator.profile.uncaptured.get(call.name),
            mutated_buffers=call.mutated_buffers,
            activations=()
            if number is not None
            else block_activations(self.simulator.graph, call, decision, seconds, smallest),
        )

    def _moved_bytes(self, away: Away, saved: int) -> int:
        """Of what a call keeps, the bytes on the host; blocks count for their first holder."""
        blocks = int(self.simulator.bytes[away.blocks].sum())
        return min(away.own_bytes + blocks, saved)

    def _sent(self, away: Away | None) -> list[str]:
        """What goes to the host, in words."""
        if away is None:
            return []
        calls = self.simulator.graph.calls
        size = away.own_bytes + int(self.simulator.bytes[away.blocks].sum())
        back = calls[away.prefetch].name if away.prefetch < len(calls) else "the end of the forward"
        return [f"sends {format_bytes(size)} to the host, back from {back} on"]

    def _variant(self, call: Call, act: Act | None) -> int | None:
        """The number of the variant the call runs by, written down when it is new."""
        if call.graph < 0:
            return None
        chosen = act.variant if isinstance(act, Pick) else 0
        for number in (0, chosen):  # the unplanned one always: it is what the plan is measured by
            if (call.graph, number) not in self._numbers:
                self._numbers[call.graph, number] = len(self.variants)
                graph = self.simulator.profile.graphs[call.graph]
                variant = self.simulator.menus[call.graph][number][0]
                self.variants.append(variant_plan(graph, variant, unplanned=number == 0))
        return self._numbers[call.graph, chosen]


def _why_kept(call: Call) -> str:
    if call.pinned:
        return f"kept: {call.pinned}"
    return "kept: a single layer" if call.leaf else HAS_ROOM
