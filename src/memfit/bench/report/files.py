"""The forms of a benchmark that lie beside its JSON: Markdown, a page, charts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.errors import UsageError

if TYPE_CHECKING:
    from memfit.ir.bench import BenchReport

CHARTS = ".charts"
_LONGEST_NAME = 100


def write_markdown(report: BenchReport, output: Path, lines: Sequence[str] = ()) -> Path:
    """Write the tables beside the JSON file `output`; return their file."""
    from memfit.bench.report.markdown import markdown

    path = output.with_suffix(".md")
    with _writing():
        path.write_text(markdown(report, lines), encoding="utf-8")
    return path


def write_forms(
    report: BenchReport, output: Path, lines: Sequence[str], *, charts: bool
) -> list[Path]:
    """Write every form of the report beside its JSON file `output`; return what was written."""
    from memfit.bench.report.charts import charts as draw
    from memfit.bench.report.page import page

    drawn = draw(report) if charts else {}
    files = [write_markdown(report, output, lines), output.with_suffix(".html")]
    folder = output.with_suffix(CHARTS)
    with _writing():
        files[1].write_text(page(report, drawn, lines), encoding="utf-8")
        for title, named in drawn.items():
            folder.mkdir(exist_ok=True)
            for name, svg in named:
                (folder / f"{chart_name(title, name)}.svg").write_text(svg, encoding="utf-8")
    return [*files, *([folder] if drawn else [])]


def chart_name(title: str, name: str) -> str:
    """The name of a chart's file; of titles that are cut, those that begin alike stay apart."""
    clean = _clean(title)
    if len(clean) > _LONGEST_NAME:
        clean = f"{clean[:_LONGEST_NAME]}-{hashlib.sha256(title.encode()).hexdigest()[:8]}"
    return f"{clean}-{_clean(name)}"


def _clean(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_.@" else "_" for c in text)


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{str(error.filename)!r} cannot be written: {error.strerror}",
            hint="choose a place that exists and is yours to write to: -o FILE",
        ) from error
