"""What the report says in words and small tables."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.ir.step_graph import CATEGORIES
from memfit.report.copies import measured_lines, planned_line, rates_line
from memfit.report.fit import numbers_in_brief, numbers_line, reference_rows, time_ratio
from memfit.report.plan import decisions_line, executor_line, uncaptured_notes
from memfit.report.run_report import RunReport
from memfit.report.terminal import ratio
from memfit.units import format_bytes, format_seconds

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Tile:
    """One number of the head of the page; `tone` is "good", "bad" or empty."""

    name: str
    value: str
    detail: str
    tone: str = ""


@dataclass(frozen=True)
class CategoryRow:
    """A category at both peaks, with its shares of the larger one in percent."""

    category: str
    name: str
    before: str
    after: str
    before_share: float
    after_share: float


def tiles(report: RunReport) -> list[Tile]:
    """Budget, peak, time and numbers."""
    plan, result = report.plan, report.result
    budget = "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    least = f"smallest possible: {format_bytes(plan.minimum_feasible_bytes)}"
    before = format_bytes(plan.baseline_peak_bytes)
    expected = ratio(plan.predicted.step_s / plan.baseline_step_s)
    if result is None:
        held = Tile("budget", budget, least)
        if report.refused is not None:
            held = Tile("budget", budget, f"{report.refused.heading}; {least}", _tone(False))
        return [
            held,
            Tile("predicted peak", format_bytes(plan.predicted.peak_bytes), f"before: {before}"),
            Tile("predicted time", expected, f"of {format_seconds(plan.baseline_step_s)}"),
            Tile("numbers", NOT_MEASURED, "the plan was not run"),
        ]
    fits = result.verdict.startswith("fits")
    measured = result.measured
    same = result.numerics.kept
    brief = numbers_in_brief(result.numerics).removeprefix("numbers ").partition(" (")[0]
    return [
        Tile("budget", budget, f"{'held' if fits else 'missed'}; {least}", _tone(fits)),
        Tile("measured peak", format_bytes(measured.peak_bytes), f"before: {before}"),
        Tile("measured time", time_ratio(result), f"predicted: {expected}"),
        Tile("numbers", brief, numbers(report).partition(" (")[0], _tone(same)),
    ]


def numbers(report: RunReport) -> str:
    """How the plan's numbers compare with those of the unplanned step; "" where it was not run."""
    return "" if report.result is None else numbers_line(report.result.numerics).plain


def comparison(report: RunReport) -> list[tuple[str, str, str, str, str]]:
    """Rows of what, before, predicted, measured and how far apart the last two are."""
    plan, result, baseline = report.plan, report.result, report.profile.baseline
    predicted = plan.predicted
    measured = None if result is None else result.measured
    plain = "" if result is None or result.baseline.measured else " (simulated)"
    rows = [
        _compared(
            "peak memory",
            format_bytes(plan.baseline_peak_bytes) + plain,
            predicted.peak_bytes,
            None if measured is None else measured.peak_bytes,
        )
    ]
    if report.profile.device.type == "cuda":
        reserved = None if baseline is None else baseline.peak_reserved_bytes
        if result is not None:
            reserved = result.baseline.peak_reserved_bytes
        rows.append(
            _compared(
                "held by the allocator",
                NOT_MEASURED if reserved is None else format_bytes(reserved),
                predicted.reserved_bytes,
                None if measured is None else measured.peak_reserved_bytes,
            )
        )
    step_s = plan.baseline_step_s if result is None else result.baseline.step_s
    expected = predicted.step_s / plan.baseline_step_s
    apart = "" if measured is None else f"{predicted.step_s / measured.step_s - 1:+.1%}"
    rows += [
        (
            "step time",
            format_seconds(step_s),
            format_seconds(predicted.step_s),
            NOT_MEASURED
            if measured is None
            else f"{format_seconds(measured.step_s)} ± {format_seconds(measured.step_s_spread)}",
            apart,
        ),
        (
            "time / before",
            f"A/A {ratio(measured.same_code_ratio)}"
            if measured is not None and measured.same_code_ratio is not None
            else "1",
            ratio(expected),
            NOT_MEASURED if result is None else time_ratio(result),
            "" if result is None else f"{result.time_error:+.1%}",
        ),
    ]
    used = None if result is None or result.swap is None else result.swap.host_highest_bytes
    if plan.host_bytes:
        rows.append(_compared("host memory for offload", "0 B", plan.host_bytes, used))
    return rows


def reference_lines(report: RunReport) -> list[str]:
    """The steps without memfit that were timed beside the plan, a sentence each."""
    rows = [] if report.result is None else reference_rows(report.result)
    return [f"Without memfit, {name}: {_sentence(str(words))}" for name, words in rows]


def categories(report: RunReport) -> list[CategoryRow]:
    """Both peaks by category, the sums last; shares are of the larger peak."""
    before, after = report.before.peak_categories, report.after.peak_categories
    most = max(report.before.peak_bytes, report.after.peak_bytes, 1)
    rows = [
        CategoryRow(
            name,
            name.replace("_", " "),
            format_bytes(before[name]),
            format_bytes(after[name]),
            100 * before[name] / most,
            100 * after[name] / most,
        )
        for name in CATEGORIES
        if before[name] or after[name]
    ]
    sums = [format_bytes(r.peak_bytes) for r in (report.before, report.after)]
    return [*rows, CategoryRow("", "all together", sums[0], sums[1], 0, 0)]


def category_checks(report: RunReport) -> list[str]:
    """How far the sums of the categories are from what the machine measured."""
    found = []
    for what, simulated, measured in (
        ("before", report.before.peak_bytes, report.measured_before_bytes),
        ("after", report.after.peak_bytes, report.measured_after_bytes),
    ):
        if measured is None:
            found.append(f"{what}: {NOT_MEASURED}")
        else:
            found.append(
                f"{what}: {format_bytes(measured)} measured, the categories sum to "
                f"{simulated / measured:.2%} of it"
            )
    return found


def plan_facts(report: RunReport) -> list[tuple[str, str]]:
    """The plan in words."""
    plan, result = report.plan, report.result
    predicted = plan.predicted
    rows = [
        ("decisions", decisions_line(plan)),
        ("techniques", ", ".join(plan.techniques) or "none"),
        ("executor", executor_line(plan)),
        (
            "planned",
            f"by {plan.strategy} in {format_seconds(plan.plan_s)}; no plan is faster than "
            f"{format_seconds(predicted.lower_bound_s)} (gap {predicted.gap:.2%})",
        ),
        ("peak", f"in {predicted.where}"),
    ]
    if (moved := planned_line(plan)) is not None:
        rows.append(("copies, planned", moved))
    if result is not None:
        rows += [(f"{what}, measured", words) for what, words in measured_lines(plan, result.swap)]
    notes = [*(plan.notes if result is None else result.notes), *uncaptured_notes(plan)]
    return [*rows, *(("note", note) for note in notes)]


def technique_rows(report: RunReport) -> list[tuple[str, str, str, str, str]]:
    """Techniques of the loss and the optimizer: taken or not, bytes, seconds and why."""
    return [
        (
            choice.name,
            "taken" if choice.taken else "left out",
            "not tried" if choice.saved_bytes is None else format_bytes(choice.saved_bytes),
            "not tried" if choice.cost_s is None else format_seconds(choice.cost_s),
            choice.why,
        )
        for choice in report.plan.choices
    ]


def environment(report: RunReport) -> list[tuple[str, str]]:
    """The machine, the versions and what is trained."""
    device, workload = report.profile.device, report.profile.workload
    return [
        ("workload", workload["name"]),
        ("model", workload["model"]),
        ("batch", workload["batch"]),
        ("optimizer", workload["optimizer"]),
        ("device", f"{device.name}, {format_bytes(device.capacity_bytes)}"),
        ("driver", device.driver or "none"),
        ("torch", device.torch),
        *([("host", device.host)] if device.host else []),
        ("memfit", report.memfit),
        ("copies", rates_line(report.profile.copy)),
        ("made", report.made),
    ]


def commands(report: RunReport) -> list[tuple[str, str]]:
    """The command that made the report, and the one that made the result."""
    ran = [("the fit", report.run_command)] if report.run_command else []
    return [*ran, ("this report", report.command)]


def _compared(
    what: str, before: str, predicted: int, measured: int | None
) -> tuple[str, str, str, str, str]:
    if measured is None:
        return what, before, format_bytes(predicted), NOT_MEASURED, ""
    apart = f"{predicted / measured - 1:+.2%}" if measured else ""
    return what, before, format_bytes(predicted), format_bytes(measured), apart


def _sentence(words: str) -> str:
    return words if words.endswith(".") else f"{words}."


def _tone(good: bool) -> str:
    return "good" if good else "bad"
