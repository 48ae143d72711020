"""A benchmark as one HTML file that needs no network."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from memfit.bench.report.tables import heading, sections
from memfit.ir.bench import DIED, BenchReport
from memfit.report.export.plots import COLOURS
from memfit.report.html.template import template

# Colours of charts and what stands for them in the style of pages, in light and dark alike.
_COLOURS = {
    "#ffffff": "ground",
    "#000000": "ink",
    "#cccccc": "line",
    "#999999": "dim",
    "#c4161c": "budget",
    "#0b62c4": "s0",
    "#d9700f": "s1",
    "#2f8f46": "s2",
    "#8a4fc0": "s3",
    "#6f6f6f": "s5",
    "#14919b": "s6",
    **{colour: name for name, colour in COLOURS.items()},
}
_TAG = re.compile("<[^<>]*>")
_COLOUR = re.compile("|".join(_COLOURS))
_NAME = "bench.html.j2"
_TEMPLATE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>memfit bench</title>
<style>
{% include "base.css.j2" %}
main p, main li { overflow-wrap: anywhere; }
h3 { font-size: 15px; margin: 16px 0 4px; }
.wide, figure { overflow-x: auto; }
header, main { max-width: 1320px; }
table { border-collapse: collapse; font-size: 13px; margin: 8px 0 16px; }
th, td { padding: 3px 8px; text-align: right; overflow-wrap: normal; }
td { white-space: nowrap; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
th:first-child, td:first-child { padding-left: 0; }
.remarks td:last-child { white-space: normal; min-width: 12em; }
@media (max-width: 640px) { .remarks td:last-child { min-width: 24em; } }
tr.died td { color: var(--bad); }
tr.own td:first-child { font-weight: bold; }
figure { margin: 0 0 16px; }
figure svg { display: block; width: 100%; min-width: 560px; max-width: 900px; height: auto; }
figure text { fill: var(--ink); }
</style>
</head>
<body>
<header>
<h1>memfit bench</h1>
</header>
<main>
<section>
{% for line in heading %}
<p class="dim">{{ line }}</p>
{% endfor %}
</section>
{% if changes %}
<section>
<h2>Against the earlier benchmark</h2>
<ul>{% for line in changes %}<li>{{ line }}</li>{% endfor %}</ul>
</section>
{% endif %}
{% for section in sections %}
<section>
<h2>{{ section.title }}</h2>
{% if section.lines %}
<ul>{% for line in section.lines %}<li>{{ line }}</li>{% endfor %}</ul>
{% endif %}
{% for table in section.tables %}
{% if table.title %}
<h3>{{ table.title }}</h3>
{% endif %}
<div class="wide"><table class="{{ table.columns[-1] }}">
<tr>{% for name in table.columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in table.rows %}
<tr class="{{ row | kind }}">{% for word in row %}<td>{{ word }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% endfor %}
{% for name, svg in charts.get(section.title, []) %}
<figure id="{{ name }}">{{ svg | safe }}</figure>
{% endfor %}
</section>
{% endfor %}
</main>
</body>
</html>
"""


def page(
    report: BenchReport,
    charts: Mapping[str, Sequence[tuple[str, str]]],
    changes: Sequence[str] = (),
) -> str:
    """The whole report, in light and dark; whatever names hold, they are shown as text."""
    themed = {
        title: [(name, _with_colours_of_the_page(svg)) for name, svg in drawn]
        for title, drawn in charts.items()
    }
    lines = [line for line in heading(report) if line]
    made: str = template(_NAME, {"kind": _row_kind}, **{_NAME: _TEMPLATE}).render(
        heading=lines, changes=changes, sections=sections(report), charts=themed
    )
    return made


def _with_colours_of_the_page(svg: str) -> str:
    """The chart with colours that change with the page's; what it says stays."""
    return _TAG.sub(lambda tag: _COLOUR.sub(_variable, tag[0]), svg)


def _variable(colour: re.Match[str]) -> str:
    return f"var(--{_COLOURS[colour[0]]})"


def _row_kind(row: Sequence[str]) -> str:
    if row[-1].startswith(tuple(f"{status.upper()}:" for status in DIED)):
        return "died"
    return "own" if row[0].startswith("memfit") else ""
