"""Files beside a benchmark's JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.bench.machine import code_digest
from memfit.bench.report.files import chart_name, write_markdown
from memfit.errors import UsageError


def test_charts_of_long_titles_do_not_write_over_each_other():
    title = "net@8 " + "n_layer=4 " * 20
    names = {chart_name(t, n) for t in (title, title + "more") for n in ("pareto", "breakdown")}
    assert len(names) == 4 and max(map(len, names)) < 130
    assert chart_name("net@8, bf16/x", "pareto") == "net@8__bf16_x-pareto"


def test_tables_that_cannot_be_written_are_an_error_with_a_hint(report, tmp_path: Path):
    with pytest.raises(UsageError, match="cannot be written") as caught:
        write_markdown(report(), tmp_path / "nowhere" / "bench.json")
    assert caught.value.hint


def test_code_has_one_name():
    assert code_digest() == code_digest() and len(code_digest()) == 12
