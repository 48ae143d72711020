"""What every table on the terminal is made of."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from memfit.cli.session import Session
from memfit.observe import MemoryProfiler
from memfit.report.terminal import category_table, columns, facts


def text(table: Table) -> str:
    console = Console(width=100, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


WORDS = ["a [/b] c", "[enforce fail at alloc_cpu.cpp:127]", "[red]", ":x:"]


@pytest.mark.parametrize("word", WORDS)
def test_brackets_in_names_are_shown_as_they_are(word):
    rows = columns(word, "n", title=word, text=[word])
    rows.add_row(word, "1")
    shown = text(rows)
    assert shown.count(word) == 3  # title, head and cell
    assert word in text(facts([(word, "value"), ("name", word)])).split("\n")[1]
    assert word in text(category_table(word, {"parameters": 1}, "sum"))


def test_a_phase_with_brackets_is_reported():
    with MemoryProfiler("cpu") as memory, memory.step(), memory.phase("a [/b] c"):
        pass
    assert "a [/b] c" in memory.generate_report()


def test_a_line_with_colons_has_no_emoji():
    out = io.StringIO()
    Session(out, as_json=False).line("mk.py:boom: nothing to judge [/b]")
    assert out.getvalue() == "mk.py:boom: nothing to judge [/b]\n"
