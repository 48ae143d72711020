"""The report's tables that sort and filter: columns of numbers, and of strings written once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from memfit.ir.plan import PARTIAL, RECOMPUTE, Plan, SegmentPlan
from memfit.ir.profile import Profile
from memfit.ir.source import Source
from memfit.report.decisions import explained_rows
from memfit.report.html.chart_data import Strings
from memfit.report.run_report import RunReport

_WORDS = {"RETAINED": "keep", "RECOMPUTE": "recompute", "SWAP": "offload"}
Cell = str | int | float | None


def segment_table(report: RunReport) -> dict[str, Any]:
    """One row per segment call: what happens to it, bytes, seconds and why."""
    times = report.profile.call_times
    rows = [
        (
            index,
            segment.name,
            segment.kind,
            segment.decision,
            _variant_words(report.plan, segment),
            segment.saved_bytes,
            segment.recomputed_bytes,
            segment.offloaded_bytes,
            segment.recompute_s if segment.decision in (PARTIAL, RECOMPUTE) else 0.0,
            times[index].forward_s,
            times[index].backward_s,
            segment.reason,
        )
        for index, segment in enumerate(report.plan.segments)
    ]
    columns = (
        ("#", "number"),
        ("segment", "text"),
        ("class", "text"),
        ("decision", "choice"),
        ("variant", "text"),
        ("saved", "bytes"),
        ("recomputed", "bytes"),
        ("offloaded", "bytes"),
        ("added", "seconds"),
        ("forward", "seconds"),
        ("backward", "seconds"),
        ("why", "text"),
    )
    return _table(columns, rows)


def decision_table(report: RunReport) -> dict[str, Any]:
    """One row per tensor that the backward needs."""
    sources = _sources(report.plan, report.profile)
    rows = [
        (
            str(row["activation_name"]).removeprefix(f"{row['segment']}/"),
            row["segment"],
            _WORDS[str(row["decision"])],
            row["median_mem_size_bytes"],
            row["recomp_time_s"],
            row["creation_rank"],
            row["first_bw_use_rank"],
            sources.get(str(row["activation_name"]), ""),
            row["reason"],
        )
        for row in explained_rows(report.plan)
    ]
    columns = (
        ("tensor", "text"),
        ("segment", "text"),
        ("decision", "choice"),
        ("size", "bytes"),
        ("to recompute", "seconds"),
        ("made at", "number"),
        ("read at", "number"),
        ("source", "text"),
        ("why", "text"),
    )
    return _table(columns, rows)


def _variant_words(plan: Plan, segment: SegmentPlan) -> str:
    """The variant a segment runs by: its number, and how much of its tensors it keeps."""
    if segment.variant is None:
        return "module" if segment.run is None else f"module, run {segment.run}"
    variant = plan.variants[segment.variant]
    again = sum(a.decision == RECOMPUTE for a in variant.activations)
    away = len(variant.offloaded)
    parts = [f"{again} of {len(variant.activations)} tensors recomputed"] if again else []
    parts += [f"{away} offloaded"] if away else []
    parts += [f"run {segment.run}"] if segment.run is not None else []
    return f"{segment.variant}: {', '.join(parts) or 'unplanned'}"


def _sources(plan: Plan, profile: Profile) -> dict[str, str]:
    """The module and line of code behind each tensor of captured segments."""
    graphs = {graph.key: graph for graph in profile.graphs}
    found = {}
    for segment in plan.segments:
        if segment.variant is None:
            continue
        variant = plan.variants[segment.variant]
        if (graph := graphs.get(variant.graph)) is None:
            continue
        for tensor in variant.activations:
            node = graph.nodes[graph.index[tensor.name]]
            found[f"{segment.name}/{tensor.name}"] = Source.read(node.source).words
    return found


def _table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Cell]]) -> dict[str, Any]:
    made: list[dict[str, Any]] = [{"title": title, "kind": kind} for title, kind in columns]
    values = list(zip(*rows, strict=True)) or [()] * len(made)
    for column, cells in zip(made, values, strict=True):
        if column["kind"] in ("text", "choice"):
            strings = Strings()
            column["values"] = [strings.number(str(cell)) for cell in cells]
            column["strings"] = strings.all
        else:
            column["values"] = [_short(cell) for cell in cells]
    always = ("number", "text", "choice")
    # A column of zeros says nothing; the first of bytes is what rows are summed up by.
    first = next((c for c in made if c["kind"] == "bytes"), None)
    shown = [c for c in made if c["kind"] in always or c is first or any(c["values"])]
    return {"columns": shown}


def _short(cell: Cell) -> Cell:
    """Seconds with as many digits as matter."""
    return float(f"{cell:.4g}") if isinstance(cell, float) else cell
