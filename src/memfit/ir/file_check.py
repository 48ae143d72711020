"""What is wrong with a file that nothing measured: numbers that no step has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

COUNTED = ("allocated", "resident", "live")  # what the bytes of a memory series are
SNAPSHOT_NUMBERS = ("step", "used_bytes", "final_bytes", "held_bytes", "retries", "seconds")

if TYPE_CHECKING:
    from memfit.ir.bench import BenchReport, ByRounds, Cell
    from memfit.ir.joint_graph import JointGraph
    from memfit.ir.memory_series import MemorySeries
    from memfit.ir.profile import Profile
    from memfit.ir.result import Result


def of_version(data: Any, version: int, name: str = "") -> Any:
    """The data, which must be an object of this version; `name` is its place in a larger one."""
    found = data.get("schema_version") if isinstance(data, dict) else None
    if type(found) is not int or found != version:
        what = f"its {name} has" if name else "it has"
        newer = type(found) is int and found > version
        by = ": a newer memfit wrote it" if newer else ""
        raise ValueError(f"{what} schema_version {found!r}, not {version}{by}")
    return data


def fault_in_profile(profile: Profile) -> str | None:
    """The first thing because of which the profile can be that of no step, or None."""
    return next(_of_profile(profile), None)


def fault_in_result(result: Result) -> str | None:
    """The first thing because of which no fit can have come to the result, or None."""
    return next(_of_result(result), None)


def fault_in_series(series: MemorySeries) -> str | None:
    """The first thing because of which no loop can have had this memory, or None."""
    return next(_of_series(series), None)


def fault_in_bench(report: BenchReport) -> str | None:
    """The first thing because of which no benchmark can have come to the report, or None."""
    return next((f for cell in report.cells for f in _of_cell(cell)), None)


def _of_profile(profile: Profile) -> Iterator[str]:
    calls, blocks = profile.graph.calls, profile.graph.blocks
    named = {
        "blocks": (len(blocks), [n for c in calls for n in (*c.args, *c.linked, *c.held.values())]),
        "calls": (len(calls), [n for b in blocks for n in (b.call, *(h.call for h in b.holds))]),
        "graphs": (len(profile.graphs), [c.graph for c in calls]),
    }
    for what, (count, numbers) in named.items():
        if max(numbers, default=-1) >= count:
            yield f"names {what} up to {max(numbers)} and holds {count}"
    if len(profile.call_times) != len(calls):
        yield f"times {len(profile.call_times)} of {len(calls)} calls"
    yield from _above_zero({"step_s": profile.step_s})
    yield from _from_zero({"host_slack_s": profile.host_slack_s, "trim_s": profile.trim_s})
    yield from _from_zero({f"between_s.{name}": s for name, s in profile.between_s.items()})
    for number, times in enumerate(profile.call_times):
        yield from _from_zero({f"call_times[{number}].{k}": v for k, v in vars(times).items()})
    yield from _above_zero({"accumulate": profile.accumulate, "split": profile.split})
    if (baseline := profile.baseline) is not None:
        sizes = {"peak_bytes": baseline.peak_bytes, "step_s": baseline.step_s}
        yield from _above_zero({f"baseline.{k}": v for k, v in sizes.items()})
    if (copy := profile.copy) is not None:
        speeds = {"out": copy.out_bytes_per_s, "in": copy.in_bytes_per_s}
        yield from _above_zero({f"copy.{k}_bytes_per_s": v for k, v in speeds.items()})
        small = {"latency_s": copy.latency_s, "drag": copy.drag, "host_s": copy.host_s}
        yield from _from_zero({f"copy.{k}": v for k, v in small.items()})
    yield from _of_step(profile)
    for number, graph in enumerate(profile.graphs):
        yield from _of_graph(f"graphs[{number}]", graph)


def _of_step(profile: Profile) -> Iterator[str]:
    graph = profile.graph
    yield from _from_zero({f"static {k}": v for k, v in graph.static.items()})
    for block in graph.blocks:
        yield from _from_zero({f"block {block.id}, bytes": block.bytes})
    ends = (0, graph.forward_end, graph.backward_end, graph.length)
    if list(ends) != sorted(ends):
        yield f"has a step whose parts end at {ends[1]}, {ends[2]} and {ends[3]}"
    for call in graph.calls:
        places = (call.enter, call.exit, call.need, call.done, call.finish)
        if max(places) > graph.length or not 0 <= call.enter <= call.exit:
            yield f"has a call of {call.name} outside of its {graph.length} positions"
    for number, call in enumerate(graph.calls):
        if not (call.index == number and call.alike < len(graph.calls)):
            yield f"has call {call.index} at place {number}"
    for number, block in enumerate(graph.blocks):
        if block.id != number:
            yield f"has block {block.id} at place {number}"


def _of_graph(where: str, graph: JointGraph) -> Iterator[str]:
    count, storages = len(graph.nodes), len(graph.storages)
    named = [*graph.outputs, *graph.gradients, *graph.unplanned, *graph.copied]
    named += [i for node in graph.nodes for i in node.inputs]
    named += [storage.maker for storage in graph.storages]
    # A gradient that is none has number -1.
    if not count or max(named, default=-1) >= count:
        yield f"names nodes up to {max(named, default=0)} of {where}, which has {count}"
    if max((s for node in graph.nodes for s in node.storages), default=-1) >= storages:
        yield f"names more storages of {where} than the {storages} there are"
    for node in graph.nodes:
        sizes = {"bytes": node.bytes, "seconds": node.seconds, "workspace": node.workspace_bytes}
        yield from _from_zero({f"{where}, {node.name}, {k}": v for k, v in sizes.items()})
        if not math.isfinite(node.read_s):
            yield f"has {node.read_s} as {where}, {node.name}, read_s"
    yield from _from_zero({f"{where}, bytes": s.bytes for s in graph.storages})


def _of_result(result: Result) -> Iterator[str]:
    for name in ("baseline", "predicted", "measured"):
        part = getattr(result, name)
        sizes = {"peak_bytes": part.peak_bytes, "step_s": part.step_s}
        yield from _above_zero({f"{name}.{k}": v for k, v in sizes.items()})
    ratios = {
        "predicted.time_ratio": result.predicted.time_ratio,
        "measured.time_ratio": result.measured.time_ratio,
        "measured.same_code_ratio": result.measured.same_code_ratio,
    }
    yield from _above_zero({name: value for name, value in ratios.items() if value is not None})
    yield from _from_zero(
        {
            "measured.step_s_spread": result.measured.step_s_spread,
            "predicted.lower_bound_s": result.predicted.lower_bound_s,
            "plan_s": result.plan_s,
            "budget_bytes": result.budget_bytes,
            "minimum_feasible_bytes": result.minimum_feasible_bytes,
        }
    )
    if not math.isfinite(result.predicted.gap):
        yield f"has {result.predicted.gap} as predicted.gap"


def _of_series(series: MemorySeries) -> Iterator[str]:
    if series.counts not in COUNTED:
        yield f"counts {series.counts!r}, which is none of {', '.join(COUNTED)}"
    yield from _above_zero({"capacity_bytes": series.capacity_bytes})
    yield from _from_zero({"initial_bytes": series.initial_bytes, "duration_s": series.duration_s})
    for number, snapshot in enumerate(series.snapshots):
        numbers = {k: getattr(snapshot, k) for k in SNAPSHOT_NUMBERS}
        known = {f"snapshots[{number}].{k}": v for k, v in numbers.items() if v is not None}
        yield from _from_zero(known)


def _of_cell(cell: Cell) -> Iterator[str]:
    sizes: dict[str, float | None] = {"step_s": cell.step_s, "peak_bytes": cell.peak_bytes}
    sizes |= _of_rounds("by_rounds", cell.by_rounds)
    if (base := cell.reference) is not None:
        numbers = {"peak_bytes": base.peak_bytes, "step_s": base.step_s, "again_s": base.again_s}
        sizes |= {f"reference.{k}": v for k, v in numbers.items()}
        sizes |= _of_rounds("reference.again_by_rounds", base.again_by_rounds)
    if (planned := cell.planned) is not None:
        sizes |= {
            "planned.unplanned_peak_bytes": planned.unplanned_peak_bytes,
            "planned.unplanned_step_s": planned.unplanned_step_s,
            "planned.predicted_ratio": planned.predicted_ratio,
            "planned.measured_ratio": planned.measured_ratio,
        }
    known = {f"{cell.key}: {k}": v for k, v in sizes.items() if v is not None}
    yield from _above_zero(known)


def _of_rounds(name: str, ratio: ByRounds | None) -> dict[str, float | None]:
    return {} if ratio is None else {f"{name}.{k}": v for k, v in vars(ratio).items()}


def _above_zero(values: Mapping[str, float]) -> Iterator[str]:
    for name, value in values.items():
        if not 0 < value < math.inf:
            yield f"has {value} as {name}, which must be above 0"


def _from_zero(values: Mapping[str, float]) -> Iterator[str]:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            yield f"has {value} as {name}, which must be 0 or more"
