"""What the report's charts draw, as small plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memfit.ir.replay import Replay
from memfit.ir.step_graph import CATEGORIES
from memfit.report.run_report import RunReport

MICROSECOND = 6  # digits of seconds that are worth drawing


class Strings:
    """Strings by number, each written once."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """The number of a string, which is put in if it is new."""
        if text not in self._numbers:
            self._numbers[text] = len(self.all)
            self.all.append(text)
        return self._numbers[text]


def memory_data(report: RunReport) -> dict[str, Any]:
    """The two memory charts: every tensor with its life, the clock, lines to compare with."""
    strings = Strings()
    before, after = (_replay_data(r, strings) for r in (report.before, report.after))
    before |= {"title": f"before: {report.before_words}", "measured": report.measured_before_bytes}
    after |= {
        "title": f"after: {report.after_words}",
        "measured": report.measured_after_bytes,
    }
    return {
        "categories": list(CATEGORIES),
        "budget": report.plan.budget_bytes,
        "strings": strings.all,
        "charts": [before, after],
    }


def _replay_data(replay: Replay, strings: Strings) -> dict[str, Any]:
    order = sorted(replay.tensors, key=lambda t: (CATEGORIES.index(t.category), t.start, -t.end))
    return {
        "length": replay.length,
        "peak": replay.peak_bytes,
        "clock": [[knot.position, round(knot.seconds, MICROSECOND + 2)] for knot in replay.clock],
        "places": [[start, strings.number(name)] for start, name in replay.places],
        "tensors": {
            "category": [CATEGORIES.index(t.category) for t in order],
            "bytes": [t.bytes for t in order],
            "start": [t.start for t in order],
            "end": [t.end for t in order],
            **{
                what: [strings.number(getattr(t, what)) for t in order]
                for what in ("name", "module", "source", "shape")
            },
        },
    }


def curve_data(report: RunReport) -> dict[str, Any] | None:
    """Budget against predicted time by strategy, this plan, what was measured; None: no curve.

    Where no plan holds the budget, the nearest one stands at what it takes.
    """
    if not report.curve:
        return None
    plan, result = report.plan, report.result
    budget = plan.budget_bytes or plan.predicted.reserved_bytes
    chosen = {
        "budget": budget if report.holds else plan.predicted.reserved_bytes,
        "name": "this plan" if report.holds else "nearest plan; none holds the budget",
        "peak": plan.predicted.peak_bytes,
        "ratio": plan.predicted.step_s / plan.baseline_step_s,
    }
    measured = None
    if result is not None and result.measured.time_ratio is not None:
        measured = {
            "budget": result.budget_bytes if plan.budget_bytes else chosen["budget"],
            "peak": result.measured.peak_bytes,
            "ratio": result.measured.time_ratio,
        }
    strategies = list(report.curve[0].plans)
    return {
        "series": [{"name": _series(report, s), "points": _points(report, s)} for s in strategies],
        "budget": budget,
        "chosen": chosen,
        "measured": measured,
    }


def _series(report: RunReport, strategy: str) -> str:
    """A strategy, and what its plans do besides keeping."""
    plans = [plan for row in report.curve if (plan := row.plans[strategy]) is not None]
    done = [t for t in ("recompute", "offload") if any(t in plan.techniques for plan in plans)]
    return f"{strategy} ({', '.join(done)})" if done else strategy


def _points(report: RunReport, strategy: str) -> Sequence[dict[str, Any]]:
    found = []
    for row in report.curve:
        plan = row.plans[strategy]
        if plan is not None:
            found.append(
                {
                    "budget": row.budget_bytes,
                    "peak": plan.predicted.peak_bytes,
                    "ratio": plan.predicted.step_s / plan.baseline_step_s,
                    "recomputed": plan.recomputed_bytes,
                    "offloaded": plan.offloaded_bytes,
                }
            )
    return found
