"""One line about a training loop that is under way."""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text

from memfit.units import format_bytes

_CELLS = 20


@dataclass(frozen=True)
class LiveStatus:
    """What the line says; `rate` and `copies` are None where nobody asked for them."""

    step: int
    used_bytes: int
    peak_bytes: int
    budget_bytes: int
    steps_per_s: float | None = None
    rate: float | None = None
    unit: str = "samples"
    copies: int | None = None


def live_line(status: LiveStatus) -> Text:
    """Used and peak memory against the budget, speed, and copies in flight."""
    used, peak = (n / status.budget_bytes for n in (status.used_bytes, status.peak_bytes))
    colour = "red" if peak > 1 else "yellow" if peak > 0.9 else "green"
    parts = [
        f"{format_bytes(status.used_bytes)} / {format_bytes(status.budget_bytes)}",
        f"peak {format_bytes(status.peak_bytes)} ({peak:.0%})",
    ]
    if status.rate is not None:
        parts.append(f"{status.rate:,.1f} {status.unit}/s")
    elif status.steps_per_s is not None:
        parts.append(f"{status.steps_per_s:,.2f} steps/s")
    if status.copies is not None:
        parts.append(f"{status.copies} copies in flight")
    bar = (_bar(used, peak), colour)
    words = "  ".join(parts)
    return Text.assemble(
        (f"step {status.step}", "bold"), "  ", bar, "  ", words, no_wrap=True, overflow="ellipsis"
    )


def _bar(used: float, peak: float) -> str:
    """Cells up to the use, lighter ones up to the peak."""
    full, to_peak = (min(_CELLS, round(_CELLS * share)) for share in (used, peak))
    return "█" * full + "▒" * max(0, to_peak - full) + "·" * (_CELLS - max(full, to_peak))
