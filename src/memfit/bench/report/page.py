"""A benchmark as one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.bench.report.tables import heading, sections
from memfit.ir.bench import DIED, BenchReport

_TEMPLATE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>memfit bench</title>
<style>
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 0.6em 0 1.2em; }
th, td { border-bottom: 1px solid #ccc; padding: 0.2em 0.7em; text-align: right; }
td { white-space: nowrap; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
td:last-child { white-space: normal; min-width: 12em; }
tr.died td { color: #a00; }
tr.own td:first-child { font-weight: bold; }
svg { max-width: 100%; height: auto; }
</style>
</head>
<body>
<h1>memfit bench</h1>
{% for line in heading %}<p>{{ line }}</p>
{% endfor %}
{% if changes %}<h2>Against the earlier benchmark</h2>
<ul>{% for line in changes %}<li>{{ line }}</li>{% endfor %}</ul>{% endif %}
{% for section in sections %}
<h2>{{ section.title }}</h2>
<ul>{% for line in section.lines %}<li>{{ line }}</li>{% endfor %}</ul>
{% for table in section.tables %}
{% if table.title %}<h3>{{ table.title }}</h3>{% endif %}
<div class="wide"><table>
<tr>{% for name in table.columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in table.rows %}
<tr class="{{ row | kind }}">{% for word in row %}<td>{{ word }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% endfor %}
{% for name, svg in charts.get(section.title, []) %}
<figure id="{{ name }}">{{ svg | safe }}</figure>
{% endfor %}
{% endfor %}
</body>
</html>
"""


def page(
    report: BenchReport,
    charts: Mapping[str, Sequence[tuple[str, str]]],
    changes: Sequence[str] = (),
) -> str:
    """The whole report; whatever names hold, they are shown as text."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["kind"] = _row_kind
    lines = [line for line in heading(report) if line]
    template: Any = environment.from_string(_TEMPLATE)
    return str(
        template.render(heading=lines, changes=changes, sections=sections(report), charts=charts)
    )


def _row_kind(row: Sequence[str]) -> str:
    if row[-1].startswith(tuple(f"{status.upper()}:" for status in DIED)):
        return "died"
    return "own" if row[0].startswith("memfit") else ""
