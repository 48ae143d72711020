"""Charts of a benchmark as SVG text: memory against time, over the batch size, by category."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from textwrap import fill
from typing import Any, NamedTuple

from memfit.bench.report.tables import part_names, parts, series_of
from memfit.bench.verdict import comparable, is_memfit, pareto_front
from memfit.errors import UsageError
from memfit.ir.bench import OUT_OF_MEMORY, BenchReport, Cell, WorkloadSpec

MIB = 2**20
SIZE = (7.0, 4.2)
NAMES_CHARACTERS = 84  # that fit side by side below the bars
# The same text for the same report, and text that stays text.
_STYLE: Any = {"svg.hashsalt": "memfit", "svg.fonttype": "none", "text.parse_math": False}
_MARKS = "osv^<>DPX*hd"
_FAR = 1.5  # times memfit's slowest: what takes longer would press all others together
_POINT = 5.0  # pixels around a point that no name stands on
# Where a name may stand, in points from its own: those that are tried first come first.
_BESIDE = tuple(
    (across, up, "left" if across > 0 else "right")
    for up in (5, -5, 13, -13, 21, -21)
    for across in (7, -7)
)
_BELOW = tuple((across, up, "center") for up in (-13, 13, -22, 22) for across in (0, -12, 12))


def check_charts() -> None:
    """Raise UsageError where charts cannot be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"charts need the package matplotlib, which cannot be imported: {error}",
            hint="pip install 'memfit[plots]', or leave the charts out with --no-charts",
        ) from error


def charts(report: BenchReport) -> dict[str, list[tuple[str, str]]]:
    """For each section's title its charts: a name and the SVG."""
    found: dict[str, list[tuple[str, str]]] = {}
    for spec in report.workloads:
        cells = report.cells_of(spec.name)
        if len(comparable(cells)) > 1:
            found.setdefault(spec.name, []).append(("pareto", pareto_chart(spec.name, cells)))
        split = [c for c in cells if c.breakdown and c.peak_bytes]
        if split:
            bars = [(c.system, c) for c in split]
            chart = breakdown_chart(f"{spec.name}: what the peak is made of", bars)
            found.setdefault(spec.name, []).append(("breakdown", chart))
    for series, specs in series_of(report).items():
        title = f"{series}, over the batch size"
        drawn = found.setdefault(title, [])
        drawn.append(("peak", sweep_chart(report, series, specs, "peak")))
        drawn.append(("time", sweep_chart(report, series, specs, "time")))
        for system, bars in _split_by_system(report, specs).items():
            chart = breakdown_chart(f"{series}, {system}: what the peak is made of", bars)
            drawn.append((f"breakdown-{system}", chart))
    return found


class Point(NamedTuple):
    """A system in a chart of memory against time; "" is no label."""

    label: str
    peak_mb: float
    time: float
    own: bool


def pareto_chart(title: str, cells: Sequence[Cell]) -> str:
    """Memory against time; the line joins what nothing else beats in both."""
    points = [Point(c.system, _mb(c), c.ratio or 0.0, is_memfit(c)) for c in comparable(cells)]
    front = [(_mb(c), c.ratio or 0.0) for c in pareto_front(cells)]
    return memory_and_time(title, points, front, "time / reference of the same run")


def memory_and_time(
    title: str, points: Sequence[Point], line: Sequence[tuple[float, float]], time: str
) -> str:
    """Points with their names, red stars for memfit, and a line; `time` says what is upwards.

    What takes far longer than memfit stands at the upper edge, with its number.
    """
    edge = _FAR * max((point.time for point in points if point.own), default=float("inf"))
    points, far = [_at_most(edge, point) for point in points], [p.time > edge for p in points]
    line = [(x, y) for x, y in line if y <= edge]
    with _figure(f"{title}: memory against time") as (axes, done):
        labels = []
        for number, (label, x, y, own) in enumerate(points):
            color = "tab:red" if own else f"C{number % 10}" if number % 10 != 3 else "tab:gray"
            mark = "*" if own else "^" if far[number] else "o"
            axes.scatter([x], [y], marker=mark, s=90 if own else 35, color=color)
            beside = {"xytext": (0, 0), "textcoords": "offset points", "fontsize": 7}
            if label:
                labels.append((axes.annotate(label, (x, y), va="center", **beside), own))
        axes.plot([x for x, _ in line], [y for _, y in line], color="0.6", lw=1, zorder=0)
        axes.margins(x=0.15, y=0.1)  # names of systems stand beside their points
        axes.set_xlabel("peak of the step, MB (2^20 bytes)")
        axes.set_ylabel(time)
        _part(axes, labels, points)
    return done[0]


def _at_most(edge: float, point: Point) -> Point:
    """The point, or where it stands at the edge."""
    if point.time <= edge:
        return point
    return point._replace(label=f"{point.label}: {point.time:.3g}", time=edge)


def _part(axes: Any, labels: Sequence[tuple[Any, bool]], points: Sequence[Point]) -> None:
    """Put names where they are on no other and on no point: those of systems beside their points,
    memfit's below. A name of memfit's that has no room is left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    canvas = FigureCanvasAgg(axes.figure)
    canvas.draw()  # places everything
    places = axes.transData.transform([(point.peak_mb, point.time) for point in points])
    taken = [Bbox.from_bounds(x - _POINT, y - _POINT, 2 * _POINT, 2 * _POINT) for x, y in places]
    for label, own in sorted(labels, key=lambda found: found[1]):
        for across, up, side in _BELOW if own else _BESIDE:
            label.set(position=(across, up), horizontalalignment=side)
            box = label.get_window_extent(canvas.get_renderer())
            inside = axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1 and axes.bbox.y0 < box.y0
            if inside and not any(box.overlaps(other) for other in taken):
                break
        else:
            across, up, side = _BESIDE[0]
            label.set(position=(across, up), horizontalalignment=side, visible=not own)
            if own:
                continue
        taken.append(box)


def sweep_chart(report: BenchReport, series: str, specs: Sequence[WorkloadSpec], what: str) -> str:
    """Peak or time of every system over the batch size; a cross marks what ran out of memory."""
    names = [w.name for w in specs]
    systems = dict.fromkeys(
        c.system for c in report.cells if c.workload in names and c.largest is None
    )
    check_charts()
    from matplotlib.ticker import FuncFormatter

    with _figure(f"{series}: {what} over the batch size") as (axes, done):
        for number, system in enumerate(systems):
            found = [(w.batch, report.find(w.name, system)) for w in specs]
            points = [
                (size, _mb(c) if what == "peak" else c.step_s * 1e3)
                for size, c in found
                if c is not None and c.ok and c.peak_bytes is not None and c.step_s is not None
            ]
            mark = _MARKS[number % len(_MARKS)]
            if points:
                axes.plot(*zip(*points, strict=True), marker=mark, label=system)
            lost = [size for size, c in found if c is not None and c.status == OUT_OF_MEMORY]
            for size in lost:
                axes.annotate(
                    f"{system}: out of memory",
                    (size, 1.0),
                    xycoords=("data", "axes fraction"),
                    rotation=90,
                    va="top",
                    fontsize=7,
                    color="tab:red",
                )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        plain = FuncFormatter(lambda value, _: f"{value:g}")  # not powers in mathematical text
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_minor_formatter(plain)
        axes.tick_params(axis="y", which="both", labelsize=7)
        axes.set_xticks([w.batch for w in specs], [str(w.batch) for w in specs])
        axes.set_xlabel("batch size")
        axes.set_ylabel("peak, MB (2^20 bytes)" if what == "peak" else "step, ms")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    return done[0]


def breakdown_chart(title: str, bars: Sequence[tuple[str, Cell]]) -> str:
    """Stacked categories that add up to the measured peak, a bar for each cell."""
    names = part_names([cell for _, cell in bars])
    with _figure(title) as (axes, done):
        low, high = [0.0] * len(bars), [0.0] * len(bars)
        places = list(range(len(bars)))
        for number, name in enumerate(names):
            sizes = [parts(cell).get(name, 0) / MIB for _, cell in bars]
            # A part below zero hangs under the axis, so that what is drawn still adds up.
            bottoms = [high[i] if size >= 0 else low[i] for i, size in enumerate(sizes)]
            color = f"C{number % 10}"
            axes.bar(places, sizes, bottom=bottoms, label=name.replace("_", " "), color=color)
            for i, size in enumerate(sizes):
                if size >= 0:
                    high[i] += size
                else:
                    low[i] += size
        peaks = [_mb(cell) for _, cell in bars]
        axes.scatter(places, peaks, marker="_", s=400, color="black", label="measured peak")
        axes.set_ylim(min(low) * 1.08, max(*high, *peaks) * 1.08)
        width = max(NAMES_CHARACTERS // len(bars), 1)
        names_below = [fill(label, width, break_long_words=False) for label, _ in bars]
        axes.set_xticks(places, names_below, fontsize=7)
        axes.set_ylabel("MB (2^20 bytes)")
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return done[0]


def _split_by_system(
    report: BenchReport, specs: Sequence[WorkloadSpec]
) -> dict[str, list[tuple[str, Cell]]]:
    found: dict[str, list[tuple[str, Cell]]] = {}
    for spec in specs:
        for cell in report.cells_of(spec.name):
            if cell.breakdown and cell.peak_bytes is not None:
                found.setdefault(cell.system, []).append((str(spec.batch), cell))
    return {system: bars for system, bars in found.items() if len(bars) > 1}


@contextmanager
def _figure(title: str) -> Iterator[tuple[Any, list[str]]]:
    """A figure with one pair of axes; the list has its SVG when the block is left."""
    check_charts()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    done: list[str] = []
    with rc_context(_STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        axes.set_title(fill(title, 80), fontsize=9)
        axes.grid(alpha=0.3)
        yield axes, done
        text = io.StringIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(text, format="svg", metadata=nothing)
    svg = text.getvalue()
    done.append(svg[svg.index("<svg") :])  # inside a page there is no place for an XML heading


def _mb(cell: Cell) -> float:
    assert cell.peak_bytes is not None
    return cell.peak_bytes / MIB
