"""A choice of acts written down as a Plan: a decision and a reason for every segment call."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.ir.plan import KEEP, PARTIAL, RECOMPUTE, Plan, SegmentPlan, VariantPlan
from memfit.ir.step_graph import Call
from memfit.planning.acts import Act, Pick, calls_of
from memfit.planning.segment.decisions import block_activations, variant_plan
from memfit.planning.simulate import Simulator
from memfit.planning.strategies import saved_bytes
from memfit.units import format_bytes, format_seconds


def write_segments(
    simulator: Simulator, acts: Sequence[Act]
) -> tuple[tuple[SegmentPlan, ...], tuple[VariantPlan, ...]]:
    """The decision for every call, and the distinct variants that captured ones run by."""
    writer = _Writer(simulator, acts)
    segments = tuple(writer.segment(call) for call in simulator.graph.calls)
    return segments, tuple(writer.variants)


def read_acts(simulator: Simulator, plan: Plan) -> tuple[Act, ...] | None:
    """The acts of a plan for this very step; None when a variant of it is not on offer any more."""
    acts: list[Act] = list(plan.runs)
    for index, segment in enumerate(plan.segments):
        if segment.decision != PARTIAL or segment.variant is None:
            continue
        number = simulator.graph.calls[index].graph
        graph = simulator.profile.graphs[number]
        saved = tuple(sorted(graph.index[n] for n in plan.variants[segment.variant].saved))
        offered = [v.saved for v, _ in simulator.menus[number]]
        if saved not in offered:
            return None
        acts.append(Pick(index, offered.index(saved)))
    return tuple(acts)


class _Writer:
    def __init__(self, simulator: Simulator, acts: Sequence[Act]) -> None:
        self.simulator = simulator
        self.act_of = {call: act for act in acts for call in calls_of(act)}
        runs = [act for act in acts if not isinstance(act, Pick)]
        self.run_number = {run: number for number, run in enumerate(runs)}
        self.variants: list[VariantPlan] = []
        self._numbers: dict[tuple[int, int], int] = {}

    def segment(self, call: Call) -> SegmentPlan:
        act = self.act_of.get(call.index)
        saved = saved_bytes(self.simulator, call.index)
        whole_s = self.simulator.profile.call_times[call.index].recompute_s
        number = self._variant(call, act)
        if isinstance(act, Pick):
            decision = PARTIAL
            seconds = self.simulator.menus[call.graph][act.variant][1]
            freed = max(saved - self.simulator.variant(act).held_bytes, 0)
            reason = f"frees {format_bytes(freed)} for {format_seconds(seconds)} inside"
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
            recompute_s=seconds,
            reason=reason,
            run=None if act is None or isinstance(act, Pick) else self.run_number[act],
            variant=number,
            uncaptured=self.simulator.profile.uncaptured.get(call.name),
            mutated_buffers=call.mutated_buffers,
            activations=()
            if number is not None
            else block_activations(self.simulator.graph, call, decision, seconds),
        )

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
    return "kept: a single layer" if call.leaf else "kept: the budget has room"
