"""A benchmark as one HTML file that needs no network."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup, escape

from memfit.bench.report.tables import Section, conclusion, heading, sections
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
h2 a { font-size: 13px; font-weight: 400; margin-left: 8px; }
h3 { font-size: 15px; margin: 16px 0 4px; }
a { color: var(--accent); }
ul { padding-left: 20px; }
header, main { max-width: 1320px; }
.summary { font-size: 17px; font-weight: 600; }
.wide {
  overflow-x: auto; margin: 8px 0 16px;
  background:
    linear-gradient(to left, var(--ground) 40%, transparent) right / 36px 100% no-repeat local,
    linear-gradient(to left, var(--line), transparent) right / 12px 100% no-repeat scroll;
}
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: 3px 8px; text-align: right; overflow-wrap: normal; }
td { white-space: nowrap; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
th:first-child, td:first-child {
  padding-left: 0; position: sticky; left: 0; background: var(--ground);
}
.remarks td:last-child { white-space: normal; min-width: 12em; }
@media (max-width: 640px) {
  .remarks td:last-child { min-width: 24em; }
  td:first-child { white-space: normal; max-width: 36vw; overflow-wrap: break-word; }
  .named td:first-child { min-width: 30vw; }
}
tr.died td { color: var(--bad); }
tr.own td:first-child { font-weight: bold; }
figure { margin: 0 0 16px; }
figure svg { display: block; width: 100%; max-width: 900px; height: auto; }
figure text { fill: var(--ink); }
code { overflow-wrap: anywhere; }
</style>
</head>
<body id="top">
<header>
<h1>memfit bench</h1>
<p class="dim">{{ heading[0] | text }}</p>
</header>
<main>
{% if changes %}
<section>
<h2>Against the earlier benchmark</h2>
<ul>{% for line in changes %}<li>{{ line | text }}</li>{% endfor %}</ul>
</section>
{% endif %}
<section>
{% for line in conclusion %}
<p class="summary">{{ line | text }}</p>
{% endfor %}
<ul class="contents">
{% for section in sections %}
<li><a href="#s{{ loop.index }}">{{ section.title }}</a>{{ section | verdict | text }}</li>
{% endfor %}
<li><a href="#how">How it was measured</a>, and what the columns mean</li>
</ul>
</section>
{% for section in sections %}
{% set number = loop.index %}
<section id="s{{ number }}">
<h2>{{ section.title }} <a href="#top">top</a></h2>
{% if section.lines %}
<ul>{% for line in section.lines %}<li>{{ line | text }}</li>{% endfor %}</ul>
{% endif %}
{% for table in section.tables %}
{% if table.title %}
<h3>{{ table.title }}</h3>
{% endif %}
<div class="wide" tabindex="0">
<table class="{{ "named" if table.columns[0] in ("system", "plan") }} {{ table.columns[-1] }}">
<tr>{% for name in table.columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in table.rows %}
<tr class="{{ row | kind }}">{% for word in row %}<td>{{ word | text }}</td>{% endfor %}</tr>
{% endfor %}
</table>
</div>
{% if table.note %}
<p class="dim">{{ table.note | text }}</p>
{% endif %}
{% endfor %}
{% for name, svg in charts.get(section.title, []) %}
<figure id="s{{ number }}-{{ name }}">{{ svg | safe }}</figure>
{% endfor %}
</section>
{% endfor %}
<section id="how">
<h2>How it was measured <a href="#top">top</a></h2>
{% for line in heading[1:] %}
<p>{{ line | text }}</p>
{% endfor %}
</section>
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
    filters: dict[str, Callable[..., object]] = {
        "kind": _row_kind,
        "text": _text,
        "verdict": _verdict,
    }
    made: str = template(_NAME, filters, **{_NAME: _TEMPLATE}).render(
        heading=[line for line in heading(report) if line],
        conclusion=conclusion(report),
        changes=changes,
        sections=sections(report),
        charts=themed,
    )
    return made


def _text(line: str) -> Markup:
    """A line with its `code` and its powers as HTML; all else is shown as it is."""
    with_code = re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(line)))
    return Markup(re.sub(r"\b2\^(\d+)", r"2<sup>\1</sup>", with_code))


def _verdict(section: Section) -> str:
    """The verdict of a workload as it goes on after the workload's name; "" if there is none."""
    first = section.lines[0] if section.lines else ""
    return first.removeprefix(section.title) if first.startswith(f"{section.title}: ") else ""


def _with_colours_of_the_page(svg: str) -> str:
    """The chart with colours that change with the page's; what it says stays."""
    return _TAG.sub(lambda tag: _COLOUR.sub(_variable, tag[0]), svg)


def _variable(colour: re.Match[str]) -> str:
    return f"var(--{_COLOURS[colour[0]]})"


def _row_kind(row: Sequence[str]) -> str:
    if row[-1].startswith(tuple(f"{status.upper()}:" for status in DIED)):
        return "died"
    return "own" if row[0].startswith("memfit") else ""
