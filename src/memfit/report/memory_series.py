"""What a memory profiler saw, as text and as the columns of its CSV file."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.ir.memory_series import MB, SPIKE_MB, MemorySeries, Spike
from memfit.report.terminal import columns, facts, share
from memfit.units import format_bytes, format_seconds

_MOST_SPIKES = 10
_WIDTH = 100
_COUNTED = {
    "allocated": "allocated by torch",
    "resident": "resident pages of the process",
    "live": "live tensors",
}


def memory_report(series: MemorySeries) -> str:
    """The whole report as plain text."""
    return as_text(
        [
            Text.assemble(("memory", "bold"), f"  {series.device}, {_COUNTED[series.counts]}"),
            facts(_facts(series)),
            _phases(series),
            *_spikes(series),
        ]
        if series.snapshots
        else [Text("memory: nothing was recorded"), *_notes(series)]
    )


def as_text(parts: Iterable[RenderableType]) -> str:
    """Renderables as text without colours, each line without spaces at its end."""
    console = Console(file=io.StringIO(), width=_WIDTH, no_color=True, force_terminal=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def _notes(series: MemorySeries) -> list[RenderableType]:
    """Why there is nothing else, where that is known."""
    return [facts([("note", Text(note)) for note in series.notes])] if series.notes else []


def _facts(series: MemorySeries) -> list[tuple[str, str | Text]]:
    peak = series.peak
    rows: list[tuple[str, str | Text]] = [
        ("peak", f"{format_bytes(peak.used_bytes)} in step {peak.step}, {peak.phase}"),
        ("initial", format_bytes(series.initial_bytes)),
        ("final", format_bytes(series.final_bytes)),
        ("capacity", f"{format_bytes(series.capacity_bytes)}, {series.peak_utilization:.1%} used"),
    ]
    if series.unused_share is not None:
        held = max(s.held_bytes or 0 for s in series.snapshots)
        rows.append(
            (
                "held",
                f"{format_bytes(held)}, of which {series.unused_share:.1%} the peak did not need; "
                f"{series.retries} allocator retries",
            )
        )
    if series.fragmentation is not None:
        text = f"at most {series.fragmentation:.1%} of what is held, at the end of a phase"
        rows.append(("fragmentation", text))
    steps = "1 step" if len(series.steps) == 1 else f"{len(series.steps)} steps"
    rows.append(("duration", f"{format_seconds(series.duration_s)}, {steps}"))
    return [*rows, *(("note", Text(note)) for note in series.notes)]


def _phases(series: MemorySeries) -> Table:
    seconds = series.phase_seconds()
    whole_s = sum(seconds.values())
    timed = ["s/step", "share"] if seconds else []
    table = columns("phase", "mean MB", "max MB", "min MB", *timed, text=["phase"])
    for name, row in series.phase_statistics().items():
        times = [format_seconds(seconds[name]), share(seconds[name], whole_s)] if seconds else []
        table.add_row(name, *(f"{size:,.1f}" for size in row), *times)
    if seconds:
        table.add_section()
        table.add_row("all phases", "", "", "", format_seconds(whole_s), "", style="bold")
    return table


def _spikes(series: MemorySeries) -> list[RenderableType]:
    spikes = series.identify_spikes()
    if not spikes:
        return [Text(f"no rise by more than {SPIKE_MB:g} MB from one step to the next")]
    rises = "rise" if len(spikes) == 1 else "rises"
    lines: list[RenderableType] = [
        Text(f"{len(spikes)} {rises} by more than {SPIKE_MB:g} MB (2^20 bytes) from step to step:")
    ]
    lines += [Text(_spike_line(spike)) for spike in spikes[:_MOST_SPIKES]]
    if len(spikes) > _MOST_SPIKES:
        lines.append(Text(f"  and {len(spikes) - _MOST_SPIKES} more"))
    return lines


def _spike_line(spike: Spike) -> str:
    return f"  step {spike.step}, {spike.phase}: +{format_bytes(spike.delta_mb * MB)}"
