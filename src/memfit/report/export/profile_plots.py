"""A profile as plots against rank, PNG and SVG: seconds, bytes and waiting of a step's operators.

They draw the rows that `memfit profile -o` writes as nodes and activations, and nothing else: a
rank is the number of an operator in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.report.export.plots import KINDS, STYLE, WIDTH, byte_unit, check_matplotlib
from memfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
PHASE_COLOURS = {"forward": "#0b62c4", "backward": "#d9700f", "optimizer/other": "#2f8f46"}
KEPT, OWN = "#2a9d8f", "#c2569b"
NAMED = 5  # rows of a plot whose names it shows, the largest ones
_HEIGHT = 3.4
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (0.0, "us"))


def write_profile_plots(nodes: Rows, activations: Rows, folder: Path) -> list[Path]:
    """Write the five plots of a profile's rows in both forms; return the files."""
    check_matplotlib()
    import matplotlib

    draw: dict[str, Callable[[], Figure]] = {
        "run_time": lambda: _run_time(nodes),
        "peak_memory": lambda: _peak_memory(nodes),
        "activation_size": lambda: _activation_size(nodes, activations),
        "inactive_time": lambda: _inactive_time(nodes, activations),
        "memory_by_rank": lambda: _memory_by_rank(nodes),
    }
    written = []
    with matplotlib.rc_context(STYLE):
        for name, made in draw.items():
            figure = made()
            for kind in KINDS:
                path = folder / f"{name}.{kind}"
                figure.savefig(path, dpi=200, metadata={"Date": None} if kind == "svg" else None)
                written.append(path)
    return written


def _run_time(nodes: Rows) -> Figure:
    figure, axes = _figure("run time of every operator")
    seconds = [row["median_run_time_s"] for row in nodes]
    size, unit = _second_unit(seconds)
    _by_phase(axes, nodes, [s / size for s in seconds])
    axes.set_ylabel(f"run time, {unit}")
    _name_largest(axes, [(r["rank"], r["median_run_time_s"], r["node_name"]) for r in nodes], size)
    return figure


def _peak_memory(nodes: Rows) -> Figure:
    figure, axes = _figure("peak memory of every operator: tensors of its segment call, workspace")
    peaks = [row["median_peak_mem_bytes"] for row in nodes]
    size, unit = byte_unit(max(peaks, default=0))
    _by_phase(axes, nodes, [peak / size for peak in peaks])
    axes.set_ylabel(f"peak memory, {unit}")
    rows = [(r["rank"], r["median_peak_mem_bytes"], r["node_name"]) for r in nodes]
    _name_largest(axes, rows, size, format_bytes)
    return figure


def _activation_size(nodes: Rows, activations: Rows) -> Figure:
    figure, axes = _figure("size of every tensor kept for the backward, where it is made")
    sizes = [row["median_mem_size_bytes"] for row in activations]
    size, unit = byte_unit(max(sizes, default=0))
    ranks = [_made_at(row) for row in activations]
    axes.vlines(ranks, 0, [n / size for n in sizes], colors=KEPT, lw=1.2)
    axes.plot(ranks, [n / size for n in sizes], "o", ms=2.5, color=KEPT)
    axes.set_ylabel(f"size, {unit}")
    axes.set_xlim(*_ends(nodes))
    axes.set_ylim(bottom=0)
    rows = [(x, n, r["activation_name"]) for x, n, r in zip(ranks, sizes, activations, strict=True)]
    _name_largest(axes, rows, size, format_bytes)
    return figure


def _inactive_time(nodes: Rows, activations: Rows) -> Figure:
    figure, axes = _figure("how long kept tensors wait, from their last use in forward to backward")
    waiting = [row for row in activations if row["first_bw_use_rank"] >= 0]
    size, unit = _second_unit([row["inactive_time_s"] for row in waiting])
    starts = [max(row["last_fw_use_rank"], _made_at(row)) for row in waiting]
    ends = [row["first_bw_use_rank"] for row in waiting]
    times = [row["inactive_time_s"] / size for row in waiting]
    axes.hlines(times, starts, ends, colors=KEPT, lw=1.0, alpha=0.6)
    axes.plot(starts, times, "o", ms=2.5, color=PHASE_COLOURS["forward"], label="last in forward")
    axes.plot(ends, times, "o", ms=2.5, color=PHASE_COLOURS["backward"], label="first in backward")
    axes.set_ylabel(f"inactive time, {unit}")
    axes.set_xlim(*_ends(nodes))
    axes.set_ylim(bottom=0)
    if waiting:
        axes.legend(frameon=False, fontsize=7)
    return figure


def _memory_by_rank(nodes: Rows) -> Figure:
    figure, axes = _figure("memory while every operator runs: tensors of its segment call")
    ranks = [row["rank"] for row in nodes]
    active = [row["median_active_mem_bytes"] for row in nodes]
    peaks = [row["median_peak_mem_bytes"] for row in nodes]
    size, unit = byte_unit(max(peaks, default=0))
    low, high = ([n / size for n in sizes] for sizes in (active, peaks))
    axes.fill_between(ranks, low, step="mid", color=KEPT, lw=0, label="active tensors")
    axes.fill_between(ranks, low, high, step="mid", color=OWN, lw=0, label="the operator's own")
    axes.set_ylabel(f"memory, {unit}")
    axes.set_xlim(*_ends(nodes))
    axes.set_ylim(bottom=0)
    for phase, start in _phases(nodes):
        axes.axvline(start - 0.5, color="0.6", lw=0.8, zorder=0)
        where = (start, 1.0)
        axes.annotate(phase, where, xycoords=("data", "axes fraction"), va="bottom", fontsize=7)
    axes.legend(frameon=False, fontsize=7)
    return figure


def _figure(title: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, _HEIGHT), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=9, pad=14)
    axes.set_xlabel("rank of the operator in the step")
    axes.grid(lw=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _by_phase(axes: Axes, nodes: Rows, heights: Sequence[float]) -> None:
    """A line for every operator, in the colour of its phase."""
    for phase, color in PHASE_COLOURS.items():
        found = [(r["rank"], h) for r, h in zip(nodes, heights, strict=True) if r["gtype"] == phase]
        if found:
            ranks, tall = zip(*found, strict=True)
            axes.vlines(ranks, 0, tall, colors=color, lw=1.0, label=phase.partition("/")[0])
            axes.plot(ranks, tall, "o", ms=2, color=color)
    axes.set_xlim(*_ends(nodes))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=7)


def _name_largest(
    axes: Axes,
    rows: Sequence[tuple[int, float, str]],
    size: float,
    words: Callable[[float], str] = format_seconds,
) -> None:
    """Name the largest rows in a list beside the plot, each by the number that it has there."""
    largest = sorted(rows, key=lambda row: -row[1])[:NAMED]
    for number, (rank, value, _) in enumerate(largest, 1):
        axes.annotate(
            str(number),
            (rank, value / size),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
    lines = [
        f"{number}  {name}, rank {rank}: {words(value)}"
        for number, (rank, value, name) in enumerate(largest, 1)
    ]
    axes.figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7)


def _phases(nodes: Rows) -> list[tuple[str, int]]:
    """Every phase and the rank at which it begins."""
    found: dict[str, int] = {}
    for row in nodes:
        found.setdefault(str(row["gtype"]).partition("/")[0], int(row["rank"]))
    return list(found.items())


def _made_at(row: Mapping[str, Any]) -> int:
    """The rank where a tensor is made, or first seen: what is given to a segment is made before."""
    ranks = (row["creation_rank"], row["last_fw_use_rank"], row["first_bw_use_rank"])
    return next((rank for rank in ranks if rank >= 0), 0)


def _ends(nodes: Rows) -> tuple[float, float]:
    return -0.02 * len(nodes) - 1, 1.02 * len(nodes) + 1


def _second_unit(seconds: Sequence[float]) -> tuple[float, str]:
    most = max(seconds, default=0.0)
    least, unit = next(u for u in _SECONDS if most >= u[0])
    return least or 1e-6, unit
