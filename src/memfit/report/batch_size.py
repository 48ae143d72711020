"""What a search for a batch size ran and found, in a table and a line."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memfit.ir.batch_size import BatchSizes, BatchTrial, PlannedBatch
from memfit.report.terminal import columns, facts, headline, note_lines, ratio
from memfit.units import format_bytes, format_seconds


def batch_size_report(found: BatchSizes) -> list[RenderableType]:
    """The whole report but for its last line."""
    rows: list[tuple[str, str | Text]] = [
        ("budget", format_bytes(found.budget_bytes)),
        ("largest", _in_words(found.largest)),
        ("fastest", _fastest(found)),
    ]
    if found.planned is not None:
        rows.append(("with a plan", _planned(found.planned, found.largest)))
    return [
        headline(found.workload, found.device),
        _runs(found),
        facts(rows),
        *note_lines(found.notes),
    ]


def summary_line(found: BatchSizes, next_command: str) -> Text:
    """Sizes, samples per second and what to do next, in one line."""
    words = [
        f"largest batch {found.largest.size} in {format_bytes(found.budget_bytes)}, "
        f"{_rate(found.largest.samples_per_s)} samples/s",
        f"fastest {found.fastest.size}, {_rate(found.fastest.samples_per_s)} samples/s",
    ]
    if found.planned is not None:
        planned = found.planned
        words.append(f"planned {planned.size}, {_rate(planned.samples_per_s)} samples/s")
    words.append(f"{len(found.trials)} runs")
    return Text("; ".join([*words, f"next: {next_command}"]))


def _runs(found: BatchSizes) -> Table:
    cuda = found.device["type"] == "cuda"
    names = ["batch", "predicted", "peak", *(["reserved"] if cuda else []), "step", "samples/s", ""]
    table = columns(*names, wrap=[""], title="plain steps under the budget, as they were run")
    for trial in found.trials:
        sizes = [trial.predicted_bytes, trial.peak_bytes]
        sizes += [trial.peak_reserved_bytes] if cuda else []
        table.add_row(
            str(trial.size),
            *("-" if size is None else format_bytes(size) for size in sizes),
            "-" if trial.step_s is None else format_seconds(trial.step_s),
            _rate(trial.samples_per_s),
            _verdict(trial),
            style="bold" if trial == found.largest else None,
        )
    return table


def _verdict(trial: BatchTrial) -> str:
    if trial.failure is not None:
        return trial.failure.splitlines()[0]
    return "holds" if trial.holds else "too large"


def _in_words(trial: BatchTrial) -> str:
    held = trial.peak_reserved_bytes or 0
    return f"{trial.size}: {format_bytes(held)}, {_rate(trial.samples_per_s)} samples/s"


def _fastest(found: BatchSizes) -> str:
    if found.fastest == found.largest:
        return f"{found.fastest.size}, the largest"
    gain = (found.fastest.samples_per_s or 0) / (found.largest.samples_per_s or 1)
    return f"{_in_words(found.fastest)}, {gain:.2f}x those of the largest; of the sizes run"


def _planned(planned: PlannedBatch, plain: BatchTrial) -> str:
    slower = ""
    if planned.time_ratio is not None:
        slower = f", {ratio(planned.time_ratio)} the time of this batch without a plan"
    return (
        f"{planned.size}, {planned.size / plain.size:.2f}x as large (predicted "
        f"{planned.predicted_size}): {format_bytes(planned.peak_reserved_bytes)}, "
        f"{_rate(planned.samples_per_s)} samples/s{slower}; "
        f"by {', '.join(planned.techniques) or 'nothing'}"
    )


def _rate(samples_per_s: float | None) -> str:
    if samples_per_s is None:
        return "-"
    return f"{samples_per_s:.1f}" if samples_per_s < 1000 else f"{samples_per_s:,.0f}"
