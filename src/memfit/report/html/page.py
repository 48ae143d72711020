"""A RunReport as one HTML file: the template with its style, scripts and data put in."""

from __future__ import annotations

import json
from typing import Any

from memfit.report.html import facts
from memfit.report.html.chart_data import curve_data, memory_data
from memfit.report.html.ended import memory_tables
from memfit.report.html.table_data import decision_table, segment_table
from memfit.report.html.template import template
from memfit.report.run_report import RunReport


def html_page(report: RunReport) -> str:
    """The whole page as text."""
    page: str = template("page.html.j2").render(
        report=report,
        tiles=facts.tiles(report),
        numbers=facts.numbers(report),
        comparison=facts.comparison(report),
        reference_lines=facts.reference_lines(report),
        categories=facts.categories(report),
        category_checks=facts.category_checks(report),
        plan_facts=facts.plan_facts(report),
        technique_rows=facts.technique_rows(report),
        environment=facts.environment(report),
        commands=facts.commands(report),
        data=script_json(page_data(report)),
        **memory_tables(report.refused),
    )
    return page


def page_data(report: RunReport) -> dict[str, Any]:
    """What the page's scripts draw."""
    return {
        "memory": memory_data(report),
        "curve": curve_data(report),
        "segments": segment_table(report),
        "decisions": decision_table(report),
    }


def script_json(data: dict[str, Any]) -> str:
    """JSON that can stand inside a script element, whatever strings are in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
