"""A report as plots for papers, PNG and SVG, by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import UsageError
from memfit.ir.replay import Replay
from memfit.ir.step_graph import CATEGORIES
from memfit.report.html.chart_data import curve_data
from memfit.report.run_report import RunReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "parameters": "#4e6e9e",
    "optimizer_state": "#8ba7cf",
    "buffers": "#9a8c7a",
    "batch": "#c9b458",
    "other": "#a7adb8",
    "gradients": "#e08a3c",
    "activations": "#2a9d8f",
    "temporaries": "#c2569b",
}
MARKED_PHASES = ("forward", "backward", "optimizer")
MARKERS = "os^Dvx_"
KINDS = ("png", "svg")
GIB, MIB = 2**30, 2**20
WIDTH = 6.5  # inches, of a page's text
SAMPLES = 600
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "memfit",
    "axes.axisbelow": True,
}


def check_matplotlib() -> None:
    """Raise UsageError where plots cannot be made."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "plots are drawn by matplotlib, which is not installed",
            hint="pip install 'memfit[plots]', or leave out --plots",
        ) from error


def write_plots(report: RunReport, folder: Path) -> list[Path]:
    """Write every plot in both forms; return the files."""
    check_matplotlib()
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figures = {"memory": _memory(report), "peaks": _peaks(report)}
        curve = curve_data(report)
        if curve is not None:
            figures["budgets"] = _budgets(curve)
        written = []
        for name, figure in figures.items():
            for kind in KINDS:
                path = folder / f"{name}.{kind}"
                figure.savefig(path, dpi=200, metadata={"Date": None} if kind == "svg" else None)
                written.append(path)
    return written


def _figure(rows: int, height: float, **options: Any) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, **options)


def _memory(report: RunReport) -> Figure:
    figure, (above, below) = _figure(2, 4.6, sharex=True, sharey=True)
    size, unit = byte_unit(max(report.before.peak_bytes, report.plan.budget_bytes or 0))
    _stack(above, report.before, size, f"before: {report.before_words}")
    _stack(below, report.after, size, f"after: {report.after_words}")
    for axes in (above, below):
        axes.set_ylabel(f"memory, {unit}")
        if report.plan.budget_bytes is not None:
            budget = report.plan.budget_bytes / size
            axes.axhline(budget, color="#c4161c", dashes=(5, 3), lw=1.2, label="budget")
    below.set_xlabel("time, ms")
    handles, names = above.get_legend_handles_labels()
    for handle, name in zip(*below.get_legend_handles_labels(), strict=True):
        if name not in names:
            handles, names = [*handles, handle], [*names, name]
    figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False)
    return figure


def _stack(axes: Axes, replay: Replay, size: int, title: str) -> None:
    positions = replay.sampled(SAMPLES)
    shown = [name for name in CATEGORIES if any(replay.curves[name])]
    times = [replay.times[p] * 1e3 for p in positions]
    curves = [[replay.curves[name][p] / size for p in positions] for name in shown]
    colours = [COLOURS[name] for name in shown]
    labels = [name.replace("_", " ") for name in shown]
    axes.stackplot(times, *curves, colors=colours, labels=labels, step="post", lw=0)
    axes.set_title(title, loc="left", fontsize=9, pad=12)
    axes.margins(x=0)
    for phase, seconds in phase_starts(replay):
        axes.axvline(seconds * 1e3, color="0.35", lw=0.7, dashes=(1, 2))
        side = "right" if seconds > 0.85 * replay.seconds else "left"
        place: Any = {"xycoords": ("data", "axes fraction"), "va": "bottom", "ha": side}
        axes.annotate(phase, (seconds * 1e3, 1.0), fontsize=7, **place)
    axes.grid(axis="y", lw=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def phase_starts(replay: Replay) -> list[tuple[str, float]]:
    """The phases of the step and the seconds at which they begin."""
    found: dict[str, float] = {}
    for position, name in replay.places:
        for phase in MARKED_PHASES:
            if name == phase or name.startswith(f"{phase} "):
                found.setdefault(phase, replay.seconds_at(position))
    return list(found.items())


def _peaks(report: RunReport) -> Figure:
    figure, axes = _figure(1, 2.2)
    replays = {"before": report.before, "after": report.after}
    size, unit = byte_unit(max(r.peak_bytes for r in replays.values()))
    for row, replay in enumerate(replays.values()):
        left = 0.0
        for name, part in replay.peak_categories.items():
            if part:
                label = name.replace("_", " ")
                axes.barh(row, part / size, left=left, color=COLOURS[name], label=label)
                left += part / size
    axes.set_yticks(range(len(replays)), list(replays))
    axes.invert_yaxis()
    axes.set_xlabel(f"bytes at the peak, {unit}")
    axes.spines[["top", "right"]].set_visible(False)
    if report.plan.budget_bytes is not None:
        budget = report.plan.budget_bytes / size
        axes.axvline(budget, color="#c4161c", dashes=(5, 3), lw=1.2, label="budget")
    found = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def _budgets(data: dict[str, Any]) -> Figure:
    figure, axes = _figure(1, 3.4)
    budgets = [p["budget"] for series in data["series"] for p in series["points"]]
    size, unit = byte_unit(max(budgets, default=0))
    for number, series in enumerate(data["series"]):
        points = [(p["budget"] / size, p["ratio"]) for p in series["points"]]
        if points:
            marker = MARKERS[number % len(MARKERS)]
            axes.plot(*zip(*points, strict=True), marker=marker, ms=4, lw=1.2, label=series["name"])
    measured = data["measured"]
    if measured is not None:
        at = measured["budget"] / size, measured["ratio"]
        axes.plot(*at, "k+", ms=11, mew=2, label="measured")
    axes.set_xlabel(f"budget, {unit}")
    axes.set_ylabel("time / before")
    axes.grid(lw=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def byte_unit(most: int) -> tuple[int, str]:
    """What to divide bytes by so that the largest are easily read, and its name."""
    return (GIB, "GiB") if most >= GIB else (MIB, "MiB")
