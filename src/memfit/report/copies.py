"""Copies to the host in words: how fast they go, what a plan moves, what the steps moved."""

from __future__ import annotations

from memfit.ir.plan import Plan
from memfit.ir.profile import CopyRates
from memfit.ir.swap import SwapStatistics
from memfit.units import format_bytes, format_seconds

SHORT_WAIT = 1e-3  # of the step: waiting less for copies is as good as not waiting
CHOOSES = ("optimal", "mutwo")  # the strategies that weigh moving against recomputing


def rates_line(rates: CopyRates | None) -> str:
    """How copies to the host and back go, as measured."""
    if rates is None:
        return "not measured: nothing can be moved to the host"
    host = f" and {format_seconds(rates.host_s)} of the host" if rates.host_s else ""
    return (
        f"{_speed(rates.out_bytes_per_s)} to the host, {_speed(rates.in_bytes_per_s)} back, "
        f"{format_seconds(rates.latency_s)} to start one{host}; {drag_words(rates)}"
    )


def drag_words(rates: CopyRates) -> str:
    """What copying does to the work beside it."""
    if not rates.overlap:
        return "nothing runs beside them"
    return f"one second of them adds {format_seconds(rates.drag)} to the work beside"


def planned_line(plan: Plan) -> str | None:
    """What a plan moves and what waits for it; None when it moves nothing."""
    if not plan.offloaded_bytes:
        return None
    return (
        f"{format_bytes(plan.offloaded_bytes)} to the host and back each batch: "
        f"{_expected(plan)}; {format_bytes(plan.host_bytes)} of host memory"
    )


def measured_lines(plan: Plan, swap: SwapStatistics | None) -> list[tuple[str, str]]:
    """What the timed steps moved and waited for, each batch, beside what was expected."""
    if swap is None:
        return []
    out, back = (format_bytes(swap.per_step(lane.bytes)) for lane in (swap.out, swap.back))
    copying_s = swap.per_step(swap.out_busy_s + swap.in_busy_s)
    count = round(swap.per_step(swap.stalls))
    waits = "1 wait" if count == 1 else f"{count} waits"
    return [
        (
            "copies",
            f"{out} to the host at {swap.out_gb_per_s:.1f} GB/s, {back} back at "
            f"{swap.in_gb_per_s:.1f} GB/s each batch; {format_bytes(swap.host_highest_bytes)} of "
            f"{format_bytes(swap.host_bytes)} host memory used",
        ),
        (
            "waiting",
            f"{format_seconds(swap.per_step(swap.stalled_s))} each batch in {waits} for "
            f"{format_seconds(copying_s)} of copying, {swap.hidden_share:.0%} hidden; "
            f"predicted: {_expected(plan)}",
        ),
    ]


def why_nothing_moves(plan: Plan, rates: CopyRates | None) -> str | None:
    """Why a plan that might move memory moves none; `rates` None: it might not."""
    if rates is None or plan.offloaded_bytes or plan.strategy not in CHOOSES:
        return None
    if not plan.recomputed_bytes:
        return "nothing is moved to the host: there is room for everything"
    size, added_s = plan.recomputed_bytes, plan.predicted.step_s - plan.baseline_step_s
    copy_s = size / rates.out_bytes_per_s + size / rates.in_bytes_per_s
    if copy_s <= added_s:  # no such comparison settles it: copies that are waited for, small pieces
        return "nothing is moved to the host: no faster plan was found that does"
    return (
        "nothing is moved to the host, recomputing is cheaper here: "
        f"{format_seconds(added_s)} for {format_bytes(size)}, which take "
        f"{format_seconds(copy_s)} to copy out and back"
    )


def _expected(plan: Plan) -> str:
    copy_s, stall_s = plan.predicted.copy_s, plan.predicted.stall_s
    copying = f"{format_seconds(copy_s)} of copying"
    if plan.workload.get("device") == "cpu":
        return f"{copying}, all waited for (a CPU copies or computes)"
    if stall_s <= SHORT_WAIT * plan.predicted.step_s:
        return f"{copying}, all of it hidden behind the work"
    hidden = max(0.0, 1 - stall_s / copy_s) if copy_s > 0 else 0.0
    return f"{copying}, {format_seconds(stall_s)} waited for ({hidden:.0%} hidden)"


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s"
