"""Charts of a benchmark as SVG text: memory against time, over the batch size, by category."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import fill
from typing import Any, NamedTuple

from memfit.bench.report.labels import Box, broken, place_names
from memfit.bench.report.tables import EAGER, part_names, parts, series_of
from memfit.bench.verdict import comparable, is_memfit, pareto_front
from memfit.errors import UsageError
from memfit.ir.bench import OUT_OF_MEMORY, BenchReport, Cell, WorkloadSpec
from memfit.report.export.plots import COLOURS

MIB = 2**20
MB = "MB (2\N{SUPERSCRIPT TWO}\N{SUPERSCRIPT ZERO} bytes)"
SIZE = (7.0, 4.4)  # inches
NAME_CHARACTERS = 30  # of a name in one line, beside its bar
# The same text for the same report, and text that stays text.
_STYLE: Any = {"svg.hashsalt": "memfit", "svg.fonttype": "none", "text.parse_math": False}
_OWN = "#c4161c"
_PEERS = ("#0b62c4", "#d9700f", "#2f8f46", "#8a4fc0", "#6f6f6f", "#14919b")
_MARKS = "osDvPX<>dhp"
# Categories have the colours of all reports; what is beside them has its own.
_PARTS = {**COLOURS, "beside CUDA graphs": "#8a4fc0", "unaccounted": "#999999"}
_OTHER = "#0b62c4"
_FAR = 1.5  # times memfit's slowest: what takes longer would press all others together
_WIDE = 5.0  # times the smallest ratio: from there on their axis has steps of factors
_NAME_SIZE = 8  # points


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
        drawn += [(over.name, sweep_chart(report, series, specs, over)) for over in OVER_BATCH]
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
        styles = _styles([point.own for point in points])
        for point, at_edge, (color, mark) in zip(points, far, styles, strict=True):
            shown = "*" if point.own else "^" if at_edge else mark
            size = 90 if point.own else 35
            axes.scatter([point.peak_mb], [point.time], marker=shown, s=size, color=color)
        axes.plot([x for x, _ in line], [y for _, y in line], color="0.6", lw=1, zorder=0)
        axes.margins(x=0.15, y=0.1)  # names of systems stand beside their points
        axes.set_xlabel(f"peak of the step, {MB}")
        axes.set_ylabel(time)
        _name_points(axes, points, line)
    return done[0]


def _styles(own: Sequence[bool]) -> list[tuple[str, str]]:
    """A colour and a mark for each; memfit's are red, and no two of them are the same."""
    counts = {True: 0, False: 0}
    found = []
    for is_own in own:
        number, colours = counts[is_own], (_OWN,) if is_own else _PEERS
        counts[is_own] += 1
        mark = _MARKS[number // len(colours) % len(_MARKS)]
        found.append((colours[number % len(colours)], mark))
    return found


def _at_most(edge: float, point: Point) -> Point:
    """The point, or where it stands at the edge."""
    if point.time <= edge:
        return point
    return point._replace(label=f"{point.label}: {point.time:.3g}", time=edge)


def _name_points(axes: Any, points: Sequence[Point], line: Sequence[tuple[float, float]]) -> None:
    """Write the names beside their points, memfit's in the best places; all are shown."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(axes.figure)
    canvas.draw()  # places everything
    named = sorted((p for p in points if p.label), key=lambda p: not p.own)
    places = [tuple(axes.transData.transform((p.peak_mb, p.time))) for p in named]
    sizes = []
    for point in named:
        text = axes.text(0, 0, point.label, **_name_font(point))
        box = text.get_window_extent(canvas.get_renderer())
        text.remove()
        sizes.append((box.width, box.height))
    found = place_names(
        list(zip(places, sizes, strict=True)),
        [tuple(axes.transData.transform((p.peak_mb, p.time))) for p in points],
        [tuple(axes.transData.transform(at)) for at in line],
        Box(*axes.bbox.extents).inner(3.0),
    )
    points_of = 72 / axes.figure.dpi  # of a pixel
    for point, (x, y), place in zip(named, places, found, strict=True):
        beside: Any = {"textcoords": "offset points", "xy": (point.peak_mb, point.time)}
        left = (place.box.x0 - x) * points_of
        below = ((place.box.y0 + place.box.y1) / 2 - y) * points_of
        font = _name_font(point)
        axes.annotate(point.label, xytext=(left, below), va="center", **font, **beside)
        if place.leader is not None:
            end = (place.leader[0] - x) * points_of, (place.leader[1] - y) * points_of
            plain = {"arrowstyle": "-", "color": "0.6", "lw": 0.7, "shrinkA": 0, "shrinkB": 3}
            axes.annotate("", xytext=end, arrowprops=plain, **beside)


def _name_font(point: Point) -> dict[str, Any]:
    return {"fontsize": _NAME_SIZE, "fontweight": "bold" if point.own else "normal"}


class Value(NamedTuple):
    """What a cell has in a chart over the batch size; the true value lies within the interval."""

    value: float
    low: float
    high: float


class OverBatch(NamedTuple):
    """A quantity over the batch size: `one` marks what the eager step is at."""

    name: str
    title: str
    axis: str
    of: Callable[[Cell], Value | None]
    one: bool = False


def _peak_value(cell: Cell) -> Value | None:
    return None if cell.peak_bytes is None else Value(_mb(cell), _mb(cell), _mb(cell))


def _ratio_value(cell: Cell) -> Value | None:
    """Its time over the eager step's, the eager step's own over itself again, as in the tables.

    None beside another step, whose ratio says something else.
    """
    base = cell.reference
    if base is None or base.kind != EAGER:
        return None
    again = cell.system == EAGER
    ratio = cell.same_code_ratio if again else cell.ratio
    rounds = base.again_by_rounds if again else cell.by_rounds
    if ratio is None:
        return None
    return Value(ratio, *((ratio, ratio) if rounds is None else (rounds.low, rounds.high)))


def _latency_value(cell: Cell) -> Value | None:
    return None if cell.step_s is None else Value(*[cell.step_s * 1e3] * 3)


OVER_BATCH = (
    OverBatch("peak", "peak over the batch size", f"peak, {MB}", _peak_value),
    OverBatch(
        "time",
        "time over the batch size, as a ratio to the eager step beside it",
        "time / eager step of the same process",
        _ratio_value,
        one=True,
    ),
    OverBatch(
        "latency",
        "latency over the batch size, in ms, each system in a process of its own: compare ratios",
        "step, ms (of different processes)",
        _latency_value,
    ),
)


def sweep_chart(
    report: BenchReport, series: str, specs: Sequence[WorkloadSpec], over: OverBatch
) -> str:
    """A quantity of every system over the batch size; what has none is named there with why."""
    names = [w.name for w in specs]
    systems = dict.fromkeys(
        c.system for c in report.cells if c.workload in names and c.largest is None
    )
    with _figure(f"{series}: {over.title}") as (axes, done):
        apart = over.one and any(c.by_rounds for c in report.cells if c.workload in names)
        shown: list[Value] = []
        lost: dict[int | None, list[str]] = {}
        styles = _styles([system.startswith("memfit") for system in systems])
        for number, (system, (color, mark)) in enumerate(zip(systems, styles, strict=True)):
            aside = _beside(number, len(systems)) if apart else 1.0
            points = []
            for spec in specs:
                cell = report.find(spec.name, system)
                value = over.of(cell) if cell is not None and cell.ok else None
                if value is not None and spec.batch is not None:
                    points.append((spec.batch * aside, value))
                elif cell is not None and (why := _why_not(cell)):
                    lost.setdefault(spec.batch, []).append(f"{system}: {why}")
            if points:
                name = f"{system} again (A/A)" if over.one and system == EAGER else system
                _plot(axes, points, marker=mark, color=color, label=name)
                shown += [value for _, value in points]
        _name_lost(axes, lost)
        _batch_axes(axes, [w.batch for w in specs], over, shown)
    return done[0]


def _beside(number: int, count: int) -> float:
    """By what a system's batch sizes are multiplied, so that intervals do not hide each other."""
    return 2 ** (0.05 * (number - (count - 1) / 2))


def _why_not(cell: Cell) -> str | None:
    """Why a cell is not in a chart, where memory is the reason."""
    if cell.status == OUT_OF_MEMORY:
        return OUT_OF_MEMORY
    return "no eager step beside it" if cell.ok else None


def _plot(axes: Any, points: Sequence[tuple[float, Value]], **look: Any) -> None:
    """A line through the points, with their intervals."""
    sizes = [size for size, _ in points]
    axes.plot(sizes, [value.value for _, value in points], markersize=5, **look)
    axes.vlines(
        sizes, [v.low for _, v in points], [v.high for _, v in points], color=look["color"], lw=1
    )


def _name_lost(axes: Any, lost: Mapping[int | None, Sequence[str]]) -> None:
    """What is missing at a batch size, at the upper edge there."""
    for size, lines in lost.items():
        axes.annotate(
            "\n".join(lines),
            (size, 1.0),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va="top",
            ha="center",
            fontsize=7,
            color=_OWN,
        )


def _batch_axes(
    axes: Any, sizes: Sequence[int | None], over: OverBatch, shown: Sequence[Value]
) -> None:
    from matplotlib.ticker import FuncFormatter

    values = [value.value for value in shown]
    axes.set_xscale("log", base=2)
    if not over.one or (values and max(values) > _WIDE * min(values)):
        axes.set_yscale("log")
        plain = FuncFormatter(lambda value, _: f"{value:g}")  # not powers in mathematical text
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_minor_formatter(plain)
    if over.one:
        axes.axhline(1.0, color="0.6", lw=1, zorder=0)
    axes.tick_params(axis="y", which="both", labelsize=7)
    axes.tick_params(axis="x", which="minor", length=0)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("batch size")
    apart = any(value.low < value.high for value in shown)
    axes.set_ylabel(over.axis + ("\n(upright: where it lies in 19 of 20 cases)" if apart else ""))
    if axes.get_legend_handles_labels()[0]:
        place = {"loc": "outside lower center", "ncols": 3, "frameon": False}
        axes.figure.legend(fontsize=7, **place)


def breakdown_chart(title: str, bars: Sequence[tuple[str, Cell]]) -> str:
    """Stacked categories that add up to the measured peak, a bar for each cell."""
    names = part_names([cell for _, cell in bars])
    with _figure(title, height=1.6 + 0.42 * len(bars)) as (axes, done):
        low, high = [0.0] * len(bars), [0.0] * len(bars)
        places = list(range(len(bars)))
        for name in names:
            sizes = [parts(cell).get(name, 0) / MIB for _, cell in bars]
            # A part below zero lies left of the axis, so that what is drawn still adds up.
            starts = [high[i] if size >= 0 else low[i] for i, size in enumerate(sizes)]
            label, color = name.replace("_", " "), _PARTS.get(name, _OTHER)
            axes.barh(places, sizes, left=starts, label=label, color=color, height=0.66)
            for i, size in enumerate(sizes):
                if size >= 0:
                    high[i] += size
                else:
                    low[i] += size
        peaks = [_mb(cell) for _, cell in bars]
        axes.scatter(peaks, places, marker="|", s=320, color="black", label="measured peak")
        axes.set_xlim(min(low) * 1.08, max(*high, *peaks) * 1.08)
        axes.set_yticks(
            places, [broken(label, NAME_CHARACTERS) for label, _ in bars], fontsize=_NAME_SIZE
        )
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(MB)
        handles = axes.get_legend_handles_labels()
        axes.figure.legend(
            *handles,
            fontsize=7,
            ncols=5,
            loc="outside lower center",
            frameon=False,
            markerscale=0.5,
        )
    return done[0]


def _split_by_system(
    report: BenchReport, specs: Sequence[WorkloadSpec]
) -> dict[str, list[tuple[str, Cell]]]:
    found: dict[str, list[tuple[str, Cell]]] = {}
    for spec in specs:
        for cell in report.cells_of(spec.name):
            if cell.breakdown and cell.peak_bytes is not None:
                found.setdefault(cell.system, []).append((f"batch {spec.batch}", cell))
    return {system: bars for system, bars in found.items() if len(bars) > 1}


@contextmanager
def _figure(title: str, height: float = SIZE[1]) -> Iterator[tuple[Any, list[str]]]:
    """A figure with one pair of axes; the list has its SVG when the block is left."""
    check_charts()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    done: list[str] = []
    with rc_context(_STYLE):
        figure = Figure(figsize=(SIZE[0], height), layout="constrained")
        axes = figure.subplots()
        axes.set_title(fill(title, 80), fontsize=9)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        yield axes, done
        text = io.StringIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(text, format="svg", metadata=nothing)
    svg = text.getvalue()
    done.append(svg[svg.index("<svg") :])  # inside a page there is no place for an XML heading


def _mb(cell: Cell) -> float:
    assert cell.peak_bytes is not None
    return cell.peak_bytes / MIB
