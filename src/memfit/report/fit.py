"""What a fit promised and what it measured, side by side, and the line that sums it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memfit.ir.plan import Plan
from memfit.ir.profile import CopyRates, Profile
from memfit.ir.result import Numerics, Result
from memfit.report.copies import measured_lines, why_nothing_moves
from memfit.report.plan import decisions_line, executor_line, uncaptured_notes
from memfit.report.techniques import technique_tables
from memfit.report.terminal import budget_word, columns, facts, headline, note_lines, ratio
from memfit.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Option:
    """A budget one could choose, and the plan that holds it."""

    name: str
    budget_bytes: int
    plan: Plan


def fit_report(
    result: Result,
    plan: Plan,
    rates: CopyRates | None = None,
    *,
    explain: bool = False,
    left_out: Mapping[str, str] | None = None,
) -> list[RenderableType]:
    """The whole report of a fit but for its last line.

    `rates` are those of copies, if the plan was allowed to move memory to the host. `explain` says
    of each technique why it was taken or not; `left_out` why some were not tried.
    """
    return [
        headline(result.workload, result.device),
        _comparison(result, plan),
        *technique_tables(plan, explain=explain, left_out=left_out),
        facts(_facts(result, plan, rates)),
        *note_lines([*result.notes, *uncaptured_notes(plan)]),
    ]


def summary_line(result: Result, next_command: str) -> Text:
    """Budget, peak, time, numbers and what to do next, in one line."""
    measured = result.measured
    return Text.assemble(
        f"budget {format_bytes(result.budget_bytes)}; "
        f"peak {format_bytes(measured.peak_bytes)} "
        f"(predicted {format_bytes(result.predicted.peak_bytes)}); "
        f"time {time_ratio(result)} baseline; ",
        (numbers_in_brief(result.numerics), "green" if result.numerics.kept else "bold red"),
        f"; next: {next_command}",
    )


def choices_lines(profile: Profile, minimum_bytes: int, unplanned_bytes: int) -> list[Text]:
    """The feasible range in words."""
    how = "takes" if profile.baseline is not None else "does not fit; simulated, it takes"
    lines = [
        Text(
            f"the plain step needs {format_bytes(unplanned_bytes)} and {how} "
            f"{format_seconds(profile.step_s)}; the smallest budget a plan can hold is "
            f"{format_bytes(minimum_bytes)}"
        )
    ]
    if minimum_bytes >= unplanned_bytes:
        fixed = format_bytes(profile.graph.fixed_bytes)
        lines.append(
            Text(
                f"recomputing saves nothing here: {fixed} are parameters, gradients, optimizer "
                "state, buffers and batch; a larger batch would leave more to choose"
            )
        )
    return lines


def choices_table(options: Sequence[Option]) -> Table:
    """Budgets to choose from, with what each is expected to cost."""
    names = ["choice", "budget", "peak", "time", "slowdown", "to ask for it"]
    moves = any(option.plan.offloaded_bytes for option in options)
    if moves:
        names.insert(5, "to host")
    title = "budgets to choose from, with the peak and the time predicted for each"
    table = columns(*names, text=("choice", "to ask for it"), title=title)
    for option in options:
        predicted = option.plan.predicted
        table.add_row(
            option.name,
            format_bytes(option.budget_bytes),
            format_bytes(predicted.peak_bytes),
            format_seconds(predicted.step_s),
            ratio(predicted.step_s / option.plan.baseline_step_s),
            *([format_bytes(option.plan.offloaded_bytes)] if moves else []),
            f"--budget {budget_word(option.budget_bytes)}",
        )
    return table


def _comparison(result: Result, plan: Plan) -> Table:
    baseline, measured, predicted = result.baseline, result.measured, result.predicted
    how = "baseline" if baseline.measured else "baseline (simulated)"
    table = columns("", "predicted", "measured", how, text=[""])
    table.add_row(
        "peak memory",
        format_bytes(predicted.peak_bytes),
        Text(format_bytes(measured.peak_bytes), style="bold"),
        format_bytes(baseline.peak_bytes),
    )
    if result.device["type"] == "cuda":
        table.add_row(
            "reserved memory",
            format_bytes(predicted.peak_reserved_bytes),
            Text(format_bytes(measured.peak_reserved_bytes), style="bold"),
            format_bytes(baseline.peak_reserved_bytes),
        )
    spread = f" ± {format_seconds(measured.step_s_spread)}" if measured.step_s_spread else ""
    table.add_row(
        "step time",
        format_seconds(predicted.step_s),
        Text(format_seconds(measured.step_s) + spread, style="bold"),
        format_seconds(baseline.step_s),
    )
    table.add_row(
        "time / baseline",
        ratio(predicted.time_ratio),
        Text(time_ratio(result), style="bold"),
        "" if measured.same_code_ratio is None else f"{ratio(measured.same_code_ratio)} of itself",
    )
    return table


def _facts(result: Result, plan: Plan, rates: CopyRates | None) -> list[tuple[str, str | Text]]:
    nothing = why_nothing_moves(plan, rates)
    rows: list[tuple[str, str | Text]] = [
        ("budget", _budget(result, plan)),
        (
            "static",
            f"{format_bytes(result.baseline.static_bytes)} parameters, gradients, "
            "optimizer state, buffers and batch",
        ),
        ("numbers", numbers_line(result.numerics)),
        ("decisions", decisions_line(plan)),
        *measured_lines(plan, result.swap),
        *([] if nothing is None else [("copies", nothing)]),
        ("executor", executor_line(plan)),
        (
            "plan",
            f"{plan.strategy}, made in {format_seconds(result.plan_s)}"
            f"{', ' + str(result.rounds) + ' rounds' if result.rounds > 1 else ''}; "
            f"at most {result.predicted.gap:.2%} above the proven least time",
        ),
    ]
    rows += reference_rows(result)
    if result.measured.retries:
        rows.append(("retries", f"the allocator retried {result.measured.retries} times"))
    return rows


def reference_rows(result: Result) -> list[tuple[str, str | Text]]:
    """The steps without memfit that were measured beside the plan, one row each."""
    rows: list[tuple[str, str | Text]] = []
    for name, found in (result.references or {}).items():
        if found is None:
            continue
        if found.step_s is None or found.peak_bytes is None or found.planned_ratio is None:
            rows.append((name, f"not measured: {found.why_not}"))
            continue
        spread = f" ± {format_seconds(found.step_s_spread)}" if found.step_s_spread else ""
        words = [f"{format_seconds(found.step_s)}{spread}, peak {format_bytes(found.peak_bytes)}"]
        words += [] if found.eager_ratio is None else [f"{ratio(found.eager_ratio)} the eager step"]
        words.append(f"the planned step takes {ratio(found.planned_ratio)} its time")
        rows.append((name, "; ".join(words)))
    return rows


def _budget(result: Result, plan: Plan) -> str:
    least = f"the smallest that a plan can hold is {format_bytes(result.minimum_feasible_bytes)}"
    if plan.budget_bytes is None:
        return f"none given; {least}"
    return f"{format_bytes(result.budget_bytes)}, held; {least}"


def time_ratio(result: Result) -> str:
    """Measured time over that of the unplanned step."""
    if result.measured.time_ratio is not None:
        return ratio(result.measured.time_ratio)
    return ratio(result.measured.step_s / result.baseline.step_s)


def numbers_in_brief(numerics: Numerics) -> str:
    """How the plan's numbers compare, in a few words."""
    if numerics.bitwise_vs_unplanned and numerics.agree:
        return "numbers identical"
    if not numerics.repeatable:
        return "numbers not comparable (the plain step does not repeat itself)"
    apart = f"they differ by {numerics.grad_max_rel_diff:.2g}"
    if _unjudged(numerics):
        return f"numbers not judged ({apart}; full precision is no measure)"
    if numerics.error_vs_reference is not None and numerics.agree:
        return "numbers as exact as unplanned"
    return f"numbers {'within tolerance' if numerics.agree else 'NOT identical'} ({apart})"


def _unjudged(numerics: Numerics) -> bool:
    """Whether full precision is too far away to judge, and the plain step, too."""
    compared = numerics.error_vs_reference is not None
    return numerics.agree and compared and not numerics.reference_judges


def numbers_line(numerics: Numerics) -> Text:
    """How the plan's numbers compare, with how far apart they are."""
    if numerics.bitwise_vs_unplanned and numerics.agree:
        text = Text("identical to the unplanned step, bit for bit", style="green")
    else:
        agreeing = "not judged" if _unjudged(numerics) else "within tolerance"
        words = agreeing if numerics.agree else "not identical"
        text = Text(
            f"{words}: loss differs by {numerics.loss_max_abs_diff:.3g}, gradients by "
            f"{numerics.grad_max_rel_diff:.3g} of their largest",
            style="" if numerics.kept else "bold red",
        )
    if numerics.error_vs_reference is not None:
        errors = numerics.error_vs_reference
        text.append(
            f"; {errors['planned']:.2g} from eager full precision, {errors['unplanned']:.2g} "
            "when unplanned"
        )
    if numerics.eager_max_rel_diff is not None:
        text.append(f"; {numerics.eager_max_rel_diff:.2g} from plain eager", style="")
    return text if numerics.note is None else text.append(f" ({numerics.note})", style="")
