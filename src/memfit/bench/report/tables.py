"""A benchmark as sections of tables and lines, which Markdown and HTML show alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memfit.bench.verdict import judge, summary_line, verdict_lines
from memfit.ir.bench import UNAVAILABLE, BenchReport, ByRounds, Cell, Planned, WorkloadSpec
from memfit.ir.step_graph import CATEGORIES
from memfit.units import format_bytes, format_seconds

MIB = 2**20
EAGER = "eager"
FEW_SAMPLES = 10

Rows = list[list[str]]


@dataclass(frozen=True)
class Table:
    """Columns and rows of text; `note` is a line below them."""

    title: str
    columns: Sequence[str]
    rows: Rows
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a report: tables and lines under a title."""

    title: str
    tables: list[Table]
    lines: list[str]


def sections(report: BenchReport) -> list[Section]:
    """The whole report: workloads, series over the batch size, largest batches."""
    found = [_workload_section(report, spec.name) for spec in report.workloads]
    for series, specs in series_of(report).items():
        tables = [Table(title, SWEEP_COLUMNS, rows) for title, rows in sweep_tables(report, specs)]
        found.append(
            Section(f"{series}, over the batch size", tables, _executors(report.cells, specs))
        )
    largest = [c for c in report.cells if c.largest is not None]
    if largest:
        table = Table("", LARGEST_COLUMNS, largest_rows(largest))
        notes = [f"{c.workload}: {note}" for c in largest if c.largest for note in c.largest.notes]
        found.append(Section("The largest batch in a fixed budget", [table], notes))
    return [section for section in found if section.tables]


def conclusion(report: BenchReport) -> list[str]:
    """What is to be said of all workloads together; nothing where nothing was compared."""
    summary = summary_line(judge(w.name, report.cells_of(w.name)) for w in report.workloads)
    return [*([] if summary is None else [summary]), *_codes(report)]


def _codes(report: BenchReport) -> list[str]:
    """Which cells other code ran than the last one's; nothing where one code ran all."""
    found: dict[str, list[str]] = {}
    for cell in report.cells:
        found.setdefault(cell.code or "of before codes were named", []).append(cell.key)
    if len(found) < 2:
        return []
    counts = ", ".join(f"{len(keys)} by {code}" for code, keys in found.items())
    return [f"Not all cells were run by the same code of memfit: {counts}."]


def _workload_section(report: BenchReport, name: str) -> Section:
    cells = [c for c in report.cells_of(name) if c.largest is None]
    if not cells:
        return Section(name, [], [])
    tables = [Table("", SYSTEM_COLUMNS, system_rows(cells))]
    if any(c.planned is not None for c in cells):
        title = "Plans, estimated and measured against the unplanned step"
        tables.append(Table(title, PLAN_COLUMNS, plan_rows(cells)))
    if any(c.breakdown for c in cells):
        parts_there = part_names(cells)
        columns = ["system", *(n.replace("_", " ") for n in parts_there), "peak"]
        title = "What the peak is made of, in MB"
        rows = breakdown_rows(cells, parts_there)
        tables.append(Table(title, columns, rows, WHAT_PARTS_ARE))
    return Section(name, tables, verdict_lines(judge(name, cells)))


def _executors(cells: Sequence[Cell], specs: Sequence[WorkloadSpec]) -> list[str]:
    """By what memfit's steps ran, which is not in the names of all systems."""
    names = {spec.name for spec in specs}
    ran = [c.planned.executor for c in cells if c.planned is not None and c.workload in names]
    found = list(dict.fromkeys(ran))
    return [f"memfit ran by the executor {' and '.join(found)}"] if found else []


BY_ROUNDS = (
    " Where ± stands behind them, overhead and A/A are medians of the ratios of all rounds: the "
    "true ones lie at most so far off in 19 of 20 cases."
)


def heading(report: BenchReport) -> list[str]:
    """Machine, settings, commands and what the columns mean."""
    facts = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    settings = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    commands = "; ".join(f"`{command}`" for command in report.commands)
    return [
        f"Machine: {facts}. Settings: {settings}.",
        *((f"Commands: {commands}",) if commands else ()),
        "",
        "MB is 2^20 bytes. Each row is a process of its own: the peak is the allocator's, of whole "
        "steps with the optimizer, reserved what it held of the device for that; times are medians "
        "± half the distance between quartiles, taken in turn with the reference (eager unless "
        "said), which is timed twice: A/A is the second over the first, less one. Overhead is the "
        "time over the reference's of the same process, less one: compare these, not milliseconds "
        "of different rows. First steps are named where they take long, and fits: they compile, "
        "unless the code is on disk. The cells of one run share that cache, and profiles; what "
        "was found there is said (cold: the cache was empty)."
        + (BY_ROUNDS if any(cell.by_rounds for cell in report.cells) else ""),
    ]


WHAT_PARTS_ARE = (
    "The parts are predicted, from a recording of every allocation of a step; the peak is the "
    "allocator's, measured. Unaccounted is the measured peak less all parts: below zero, where "
    "more was predicted."
)
SYSTEM_COLUMNS = [
    "system",
    "peak MB",
    "cut",
    "reserved MB",
    "step ms",
    "overhead",
    "A/A",
    "retries",
    "remarks",
]
PLAN_COLUMNS = [
    "plan",
    "budget MB",
    "peak MB estimated",
    "measured",
    "saved MB estimated",
    "measured",
    "added ms estimated",
    "measured",
    "time estimated",
    "measured",
    "executor",
    "segments chosen",
    "numbers",
]
SWEEP_COLUMNS = [
    "batch",
    "base MB",
    "MB",
    "cut %",
    "base ms",
    "ms",
    "overhead %",
    "A/A %",
    "retries",
    "remarks",
]
LARGEST_COLUMNS = [
    "workload",
    "budget",
    "largest batch",
    "samples/s",
    "with a plan",
    "samples/s",
    "times as large",
    "by",
]


def system_rows(cells: Sequence[Cell]) -> Rows:
    """A row for each system, and one for the reference against itself."""
    rows = []
    for cell in cells:
        if cell.largest is not None:
            continue
        rows.append(_system_row(cell))
        if cell.system == EAGER and cell.ok and cell.same_code_ratio is not None:
            assert cell.reference is not None
            rows.append(
                [
                    "eager again (A/A)",
                    mb(cell.reference.peak_bytes),
                    "",
                    mb(cell.reference.reserved_bytes),
                    f"{cell.reference.again_s * 1e3:.2f}",
                    *[_difference(cell.same_code_ratio, cell.reference.again_by_rounds)] * 2,
                    str(cell.reference.retries),
                    "",
                ]
            )
    return rows


def _system_row(cell: Cell) -> list[str]:
    if not cell.ok:
        return [cell.system, *["-"] * (len(SYSTEM_COLUMNS) - 2), remark(cell)]
    cut = None if cell.peak_ratio is None else 1 - cell.peak_ratio
    again = None if cell.reference is None else cell.reference.again_by_rounds
    return [
        cell.system,
        mb(cell.peak_bytes),
        percent(cut, plus=False),
        mb(cell.reserved_bytes),
        _milliseconds(cell),
        _difference(cell.ratio, cell.by_rounds),
        _difference(cell.same_code_ratio, again),
        str(cell.retries),
        remark(cell),
    ]


def plan_rows(cells: Iterable[Cell]) -> Rows:
    """Promise and measurement of every plan."""
    rows = []
    for cell in cells:
        plan = cell.planned
        if plan is None:
            continue
        measured = plan.measured_added_s
        rows.append(
            [
                cell.system,
                mb(plan.budget_bytes),
                mb(plan.predicted_peak_bytes),
                mb(plan.measured_peak_bytes),
                mb(plan.estimated_saved_bytes),
                mb(plan.measured_saved_bytes),
                f"{plan.estimated_added_s * 1e3:+.2f}",
                "-" if measured is None else f"{measured * 1e3:+.2f}",
                f"{plan.predicted_ratio:.3f}x",
                "-" if plan.measured_ratio is None else f"{plan.measured_ratio:.3f}x",
                plan.executor,
                f"{len(plan.chosen)} of {plan.segments}",
                _numbers(cell),
            ]
        )
    return rows


def part_names(cells: Iterable[Cell]) -> list[str]:
    """The categories that any of the cells has bytes in; `unaccounted` is the last one."""
    found = dict.fromkeys(name for c in cells for name, size in parts(c).items() if size)
    order = {name: number for number, name in enumerate(CATEGORIES)}
    return sorted(found, key=lambda n: (n == "unaccounted", order.get(n, len(order))))


def parts(cell: Cell) -> dict[str, int]:
    """The peak by category; `unaccounted` is what the recording and the allocator differ in."""
    if not cell.breakdown or cell.peak_bytes is None:
        return {}
    return cell.breakdown | {"unaccounted": cell.peak_bytes - sum(cell.breakdown.values())}


def breakdown_rows(cells: Iterable[Cell], names: Sequence[str]) -> Rows:
    """The parts of each peak that is known by category; they add up to the last column."""
    return [
        [cell.system, *(mb(parts(cell).get(name, 0)) for name in names), mb(cell.peak_bytes)]
        for cell in cells
        if cell.breakdown and cell.peak_bytes is not None
    ]


def series_of(report: BenchReport) -> dict[str, list[WorkloadSpec]]:
    """Workloads that differ in their batch size alone, by name; at least two sizes."""
    found: dict[str, list[WorkloadSpec]] = {}
    for spec in report.workloads:
        if spec.series is not None and spec.batch is not None:
            found.setdefault(spec.series, []).append(spec)
    ordered = {name: sorted(s, key=lambda w: w.batch or 0) for name, s in found.items()}
    return {name: specs for name, specs in ordered.items() if len(specs) > 1}


def sweep_tables(report: BenchReport, specs: Sequence[WorkloadSpec]) -> list[tuple[str, Rows]]:
    """One table for each system: the plain step and the system's at every batch size."""
    names = {w.name for w in specs}
    systems = dict.fromkeys(
        c.system for c in report.cells if c.workload in names and c.largest is None
    )
    tables = []
    for system in systems:
        rows = []
        for spec in specs:
            cell = report.find(spec.name, system)
            if cell is not None:
                rows.append(_sweep_row(spec, cell))
        title = "eager against itself (A/A control)" if system == EAGER else system
        tables.append((title, rows))
    return tables


def _sweep_row(spec: WorkloadSpec, cell: Cell) -> list[str]:
    size = str(spec.batch)
    base = cell.reference
    if not cell.ok:
        return [size, *["-"] * 8, remark(cell)]
    again = cell.system == EAGER and base is not None
    a_a = _points(cell.same_code_ratio, None if base is None else base.again_by_rounds)
    seconds = base.again_s if again and base is not None else cell.step_s
    return [
        size,
        mb(None if base is None else base.peak_bytes),
        mb(cell.peak_bytes),
        _number(None if cell.peak_ratio is None else 100 * (1 - cell.peak_ratio)),
        _number(None if base is None else base.step_s * 1e3),
        _number(None if seconds is None else seconds * 1e3),
        a_a if again else _points(cell.ratio, cell.by_rounds),
        a_a,
        str(cell.retries + (0 if base is None else base.retries)),
        remark(cell),
    ]


def largest_rows(cells: Iterable[Cell]) -> Rows:
    """The largest batch, plain and planned."""
    rows = []
    for cell in cells:
        found = cell.largest
        if found is None:
            continue
        size = found.planned_size
        rows.append(
            [
                cell.workload,
                format_bytes(found.budget_bytes),
                str(found.plain_size),
                _number(found.plain_samples_per_s),
                "none is larger" if size is None else str(size),
                _number(found.planned_samples_per_s),
                "-" if size is None else f"{size / found.plain_size:.2f}",
                ", ".join(found.techniques) or "-",
            ]
        )
    return rows


def remark(cell: Cell) -> str:
    """What is to be known about a cell beside its numbers, in a few words."""
    if not cell.ok:
        reason = cell.reason or ""
        return reason if cell.status == UNAVAILABLE else f"{cell.status.upper()}: {reason}"
    words = []
    if cell.retries or (cell.reference is not None and cell.reference.retries):
        words.append("RETRIES of the allocator: memory was short, so times are not the step's own")
    if cell.reference is not None and cell.reference.kind != EAGER:
        words.append(f"against {cell.reference.kind}")
    if cell.planned is not None and not cell.planned.numbers_agree:
        words.append("NUMBERS DIFFER")
    if cell.samples < FEW_SAMPLES:
        words.append(f"median of {cell.samples} only")
    if cell.first_steps_s is not None and cell.step_s is not None:
        if cell.first_steps_s > 10 * cell.step_s + 1:
            words.append(f"first steps {format_seconds(cell.first_steps_s)}{_compiled(cell)}")
    if cell.planned is not None:
        by = cell.planned.profile_of
        words.append(
            f"fit {format_seconds(cell.planned.fit_s)}{_compiled(cell)}{_parts(cell.planned)}"
        )
        words += [f"planned from the profile of {by}"] if by is not None else []
    return "; ".join([*words, *cell.notes])


def _parts(planned: Planned) -> str:
    """What a fit's seconds went into, where that was taken down."""
    if not planned.proof_s:
        return ""
    rest = planned.fit_s - planned.profile_s - planned.proof_s
    parts = {"profile": planned.profile_s, "plan and compile": rest, "proof": planned.proof_s}
    return ": " + ", ".join(f"{name} {format_seconds(s)}" for name, s in parts.items())


def _compiled(cell: Cell) -> str:
    return "" if cell.compiled is None else f" ({cell.compiled.label})"


def mb(size: int | None) -> str:
    """Bytes in MB of 2^20."""
    if size is None:
        return "-"
    return f"{size / MIB:.0f}" if abs(size) >= 100 * MIB else f"{size / MIB:.2f}"


def percent(share: float | None, *, plus: bool = True) -> str:
    """A share in percent, with its sign."""
    if share is None:
        return "-"
    return f"{share:+.1%}" if plus else f"{share:.1%}"


def _difference(ratio: float | None, by_rounds: ByRounds | None) -> str:
    """A ratio less one in percent, with what it may be off by."""
    return percent(None if ratio is None else ratio - 1) + _within(by_rounds)


def _points(ratio: float | None, by_rounds: ByRounds | None) -> str:
    """The same where per cent stand in the column's name."""
    return _number(None if ratio is None else 100 * (ratio - 1)) + _within(by_rounds)


def _within(by_rounds: ByRounds | None) -> str:
    return "" if by_rounds is None else f" ±{100 * by_rounds.within:.1f}"


def _milliseconds(cell: Cell) -> str:
    if cell.step_s is None:
        return "-"
    return f"{cell.step_s * 1e3:.2f} ± {cell.spread_s * 1e3:.2f}"


def _numbers(cell: Cell) -> str:
    plan = cell.planned
    assert plan is not None
    if plan.bitwise:
        return "the same"
    return "agree" if plan.numbers_agree else "differ"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
