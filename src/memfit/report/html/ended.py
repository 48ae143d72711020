"""A fit that ended without a profile, as one HTML file; and how far any fit came that ended so."""

from __future__ import annotations

from typing import Any

from memfit.ir.ended import NoResult, OutOfMemory
from memfit.report.html.template import template
from memfit.report.run_report import EndedReport
from memfit.units import format_bytes, format_seconds

_COLOURS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer state": "optimizer_state",
    "buffers": "buffers",
    "batch": "batch",
    "activations": "activations",
    "saved for backward, workspaces": "temporaries",
}


def ended_page(report: EndedReport) -> str:
    """The whole page as text."""
    refused = report.refused
    page: str = template("ended.html.j2").render(
        report=report,
        refused=refused,
        what=[refused.workload[k] for k in ("model", "batch", "optimizer") if k in refused.workload]
        + ([refused.device["name"]] if "name" in refused.device else []),
        environment=_environment(report),
        commands=_commands(report),
        **memory_tables(refused),
    )
    return page


def memory_tables(refused: NoResult | None) -> dict[str, Any]:
    """What is shown of running out of memory: stages, bytes by kind and the largest tensors."""
    memory = None if refused is None else refused.memory
    if memory is None:
        return {"memory": None, "stages": [], "kinds": [], "live": ""}
    live, all_bytes = memory.live_bytes, memory.capacity_bytes
    return {
        "memory": memory,
        "stages": _stages(memory),
        "kinds": _kinds(memory),
        "live": f"{format_bytes(live)} of {format_bytes(all_bytes)} that the device has",
    }


def _stages(memory: OutOfMemory) -> list[tuple[str, str, bool]]:
    """Stages with their seconds, and which is the one that ended."""
    last = len(memory.stages) - 1
    return [
        (stage.doing, format_seconds(stage.seconds), number == last)
        for number, stage in enumerate(memory.stages)
    ]


def _kinds(memory: OutOfMemory) -> list[tuple[str, str, str, float]]:
    """Kinds with their colour, bytes and share of all that was live in percent."""
    live = max(memory.live_bytes, 1)
    return [
        (kind, _COLOURS.get(kind, "other"), format_bytes(size), 100 * size / live)
        for kind, size in memory.kinds.items()
        if size
    ]


def _environment(report: EndedReport) -> list[tuple[str, str]]:
    device, workload = report.refused.device, report.refused.workload
    known = [name for name in ("model", "batch", "optimizer") if name in workload]
    rows: list[tuple[str, str]] = [(name, workload[name]) for name in known]
    if device:
        size = format_bytes(device["capacity_bytes"])
        rows += [("device", f"{device['name']}, {size}"), ("torch", device["torch"])]
    return [*rows, ("memfit", report.memfit), ("made", report.made)]


def _commands(report: EndedReport) -> list[tuple[str, str]]:
    ran = [("the fit", report.run_command)] if report.run_command else []
    return [*ran, ("this report", report.command)]
