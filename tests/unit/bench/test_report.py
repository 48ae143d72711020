"""Tables, charts and the page, from cells made by hand."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import pytest
from rich.console import Console

from memfit.bench.report.charts import (
    OVER_BATCH,
    Point,
    breakdown_chart,
    charts,
    check_charts,
    memory_and_time,
    sweep_chart,
)
from memfit.bench.report.labels import broken
from memfit.bench.report.markdown import markdown
from memfit.bench.report.page import page
from memfit.bench.report.tables import (
    SYSTEM_COLUMNS,
    Table,
    breakdown_rows,
    largest_rows,
    part_names,
    parts,
    plan_rows,
    series_of,
    sweep_tables,
    system_rows,
)
from memfit.bench.report.terminal import shown_table
from memfit.bench.workloads import named, sized
from memfit.errors import UsageError
from memfit.ir.bench import (
    CRASHED,
    OUT_OF_MEMORY,
    UNAVAILABLE,
    ByRounds,
    LargestBatch,
    WorkloadSpec,
)
from memfit.report.export.plots import COLOURS

MIB = 2**20
ODD = "<script>alert('x')</script> & | $x^2$"


def test_a_row_for_every_system_and_one_for_the_eager_step_again(cell):
    rows = system_rows(
        [
            cell("eager", 100, 1.0, noise=0.02),
            cell("memfit:60%", 60, 1.2),
            cell("compile", status=OUT_OF_MEMORY, reason="no room"),
            cell("deepspeed-offload", status=UNAVAILABLE, reason="deepspeed is not installed"),
        ]
    )
    assert rows == [
        ["eager", "100", "0.0%", "-", "10.00 ± 0.00", "+0.0%", "+2.0%", "0", ""],
        ["eager again (A/A)", "100", "", "110", "10.20", "+2.0%", "+2.0%", "0", ""],
        ["memfit:60%", "60.00", "40.0%", "-", "12.00 ± 0.00", "+20.0%", "+1.0%", "0", ""],
        ["compile", *["-"] * 7, "OUT OF MEMORY: no room"],
        ["deepspeed-offload", *["-"] * 7, "deepspeed is not installed"],
    ]


def test_names_on_a_terminal_break_between_words_and_remarks_stand_below(cell, planned):
    """A terminal of 100 columns had "checkpo" above "int", and remarks a word to a line."""
    names = ["checkpoint-compiled", "memfit:45% allow=+tiled_loss+step_in_backward"]
    plan = cell(names[1], 90, 1.2, planned=planned())
    died = cell("compile", status=OUT_OF_MEMORY, reason="no room")
    rows = system_rows([cell(names[0], 95, 27.5, noise=0.3), plan, died])
    shown, remarks = shown_table(Table("", SYSTEM_COLUMNS, rows))
    console = Console(width=100, file=io.StringIO())
    console.print(shown)
    lines = console.file.getvalue().splitlines()
    for start in ("checkpoint-compiled", "memfit:45%", "allow=+tiled_loss", "+step_in_backward"):
        assert any(line.split()[:1] == [start] for line in lines), start
    assert "…" not in console.file.getvalue()
    assert remarks == [f"{names[1]}: fit 3.00 s", "compile: OUT OF MEMORY: no room"]


def test_remarks_name_retries_few_samples_and_another_reference(cell, planned):
    one = cell("memfit:60%", 60, 1.2, kind="unplanned", planned=planned(numbers_agree=False))
    rows = system_rows([replace(one, retries=3, samples=4)])
    assert rows[0][-2] == "3"
    assert rows[0][-1] == (
        "RETRIES of the allocator: memory was short, so times are not the step's own; "
        "against unplanned; NUMBERS DIFFER; median of 4 only; fit 3.00 s"
    )


def test_ratios_by_rounds_go_before_those_of_medians(cell, report):
    old = cell("eager", 100, 1.0)
    base = replace(old.reference, again_by_rounds=ByRounds(1.002, 0.998, 1.004))
    new = replace(old, reference=base, by_rounds=ByRounds(0.999, 0.99, 1.01))
    new = replace(new, spread_s=0.5)  # of the machine, which slowed both down alike
    assert (new.ratio, new.same_code_ratio) == (0.999, 1.002)
    assert new.noise == pytest.approx(0.011, rel=0.01)
    outliers = replace(new, by_rounds=ByRounds(1.0, 0.999, 1.1))  # on one side only
    assert outliers.noise == pytest.approx(0.1)
    assert replace(new, by_rounds=None).noise > 10
    first, again = system_rows([new])
    assert (first[5], first[6]) == ("-0.1% ±1.1", "+0.2% ±0.4")
    assert again[5] == again[6] == "+0.2% ±0.4"
    assert "in 19 of 20 cases" in markdown(report(new))
    assert "in 19 of 20 cases" not in markdown(report(old))


def test_plans_show_estimate_and_measurement(cell, planned):
    (row,) = plan_rows([cell("eager", 100, 1.0), cell("memfit:60%", 61, 1.2, planned=planned())])
    assert row == [
        "memfit:60%",
        "64.00",
        "60.00",
        "61.00",
        "40.00",
        "39.00",
        "+2.00",
        "+2.50",
        "1.200x",
        "1.250x",
        "graph",
        "2 of 6",
        "the same",
    ]
    without = cell("memfit:60%", 61, 1.2, planned=planned(measured_ratio=None))
    assert plan_rows([without])[0][7] == "-"


def test_parts_of_the_peak_add_up_to_it(cell):
    split = {"parameters": 30 * MIB, "activations": 60 * MIB}
    one = cell("eager", 100, 1.0, breakdown=split)
    assert sum(parts(one).values()) == one.peak_bytes
    assert parts(one)["unaccounted"] == 10 * MIB
    names = ["parameters", "activations", "unaccounted"]
    assert breakdown_rows([one, cell("compile", 90, 1.0)], names) == [
        ["eager", "30.00", "60.00", "10.00", "100"]
    ]


@pytest.fixture
def swept(cell, report):
    specs = sized(WorkloadSpec("", "encoder", seq=128), (8, 4))
    cells = [
        make
        for spec in specs
        for make in (
            cell("eager", 100, 1.0, workload=spec.name, breakdown={"parameters": 100 * MIB}),
            cell("memfit:65%", 65, 1.1, workload=spec.name),
        )
    ]
    cells[1] = cell("memfit:65%", workload=specs[0].name, status=OUT_OF_MEMORY, reason="no room")
    return report(*cells, specs=specs)


def test_a_sweep_has_a_table_for_each_system_by_batch_size(swept):
    ((series, specs),) = series_of(swept).items()
    assert series == "encoder x128" and [w.batch for w in specs] == [4, 8]
    control, memfit = sweep_tables(swept, specs)
    assert control[0] == "eager against itself (A/A control)"
    assert [row[0] for row in control[1]] == ["4", "8"]
    assert control[1][0][6] == control[1][0][7] == "1.00"
    assert memfit == (
        "memfit:65%",
        [
            ["4", "100", "65.00", "35.00", "10.00", "11.00", "10.00", "1.00", "0", ""],
            ["8", *["-"] * 8, "OUT OF MEMORY: no room"],
        ],
    )


def test_one_size_alone_is_no_series(report, cell):
    spec = named(WorkloadSpec("", "encoder", 8, 128))
    assert series_of(report(cell("eager", 100, 1.0, workload=spec.name), specs=(spec,))) == {}


def test_largest_batches_are_set_side_by_side(cell):
    found = LargestBatch(8 * MIB, 15, 1500.0, 30, 1200.0, None, ("recompute",))
    none = LargestBatch(8 * MIB, 15, 1500.0)
    rows = largest_rows([cell("largest-batch:8MiB", largest=x) for x in (found, none)])
    assert rows[0][1:] == ["8.00 MiB", "15", "1500.00", "30", "1200.00", "2.00", "recompute"]
    assert rows[1][4] == "none is larger"


def test_markdown_tables_are_whole_whatever_names_hold(cell, report):
    text = markdown(report(cell("eager", 100, 1.0, workload=ODD), cell(f"a|b\n{ODD}", 50, 1.0)))
    tables = [line for line in text.splitlines() if line.startswith("|")]
    for line in tables[2:4]:
        assert len(re.findall(r"(?<!\\)\|", line)) == len(re.findall(r"\|", tables[0]))
    assert "a\\|b <script>" in text


def test_the_page_shows_odd_names_as_text_and_asks_no_network(cell, report):
    pytest.importorskip("matplotlib")
    made = report(
        cell("eager", 100, 1.0, workload=ODD),
        cell(ODD, 50, 1.2, workload=ODD, breakdown={"parameters": 50 * MIB}),
        cell("compile", workload=ODD, status=CRASHED, reason=ODD),
    )
    text = page(made, charts(made), [ODD])
    assert "<script" not in text
    assert "&lt;script&gt;" in text and '<tr class="died">' in text
    links = re.findall(r"(?:src|href)\s*=\s*[\"'](?!#)[^\"']*", text)
    assert links == [] and "url(http" not in text and "@import" not in text


def test_the_page_begins_with_verdicts_that_lead_to_their_sections(cell, report):
    """The conclusion was the last line of a page of 30,600 pixels without a list of contents."""
    made = report(
        *(cell(name, 100, 1.0, workload=w) for w in ("a@4", ODD) for name in ("eager", "compile")),
        cell("memfit:60%", 60, 1.2, workload="a@4"),
    )
    made = replace(made, commands=("memfit bench",))
    text = page(made, {})
    assert text.index("1 workload: memfit is faster at 0 of 1 points") < text.index("<ul")
    assert '<a href="#s1">a@4</a>: memfit is faster at 0 of 1 points, alone at 1' in text
    targets = re.findall(r'href="#([^"]*)"', text)
    assert {"s1", "s2", "how", "top"} == set(targets)
    assert all(f' id="{name}"' in text for name in targets)
    assert "Commands: <code>memfit bench</code>" in text and "MB is 2<sup>20</sup> bytes" in text
    assert "`" not in text and "2^20" not in text
    lines = markdown(made).splitlines()
    assert lines.index("## In all") < lines.index("## a@4")


def test_charts_have_the_colours_of_the_page(cell, report):
    """They were black on white in a page that had no dark."""
    pytest.importorskip("matplotlib")
    name = "a name with #000000"
    made = report(cell("eager", 100, 1.0, workload=name), cell("compile", 50, 1.2, workload=name))
    drawn = charts(made)
    text = page(made, drawn)
    styles = re.findall(r'style="[^"]*"', text)
    assert any("stroke: var(--ink)" in style for style in styles)
    assert any("fill: var(--ground)" in style for style in styles)
    assert not any(re.search("#(000000|ffffff|1f77b4)", style) for style in styles)
    assert "prefers-color-scheme: dark" in text
    assert f">{name}: memory against time</text>" in text, "what is said stays"
    ((_, svg),) = drawn[name]
    assert "#000000" in svg and "var(--" not in svg, "a file of its own has no page around it"


def test_names_of_bars_do_not_run_into_each_other(cell):
    """Those of long names did, below their bars."""
    pytest.importorskip("matplotlib")
    long = "memfit:45% allow=+tiled_loss+step_in_backward"
    names = ["eager", long, *(f"memfit:{share}% launch=graphs" for share in (80, 60, 40, 20, 10))]
    bars = [(name, cell(name, 100, 1.0, breakdown={"parameters": MIB})) for name in names]
    svg = breakdown_chart("peaks", bars)
    assert ">memfit:80% launch=graphs<" in svg and ">memfit:45% allow=+tiled_loss<" in svg
    heights = [_place(svg, line)[1] for line in ("memfit:80% launch=graphs", "+step_in_backward")]
    assert abs(heights[0] - heights[1]) > 10
    assert broken("a" * 50, 30) == "a" * 50 and broken("", 30) == ""


def test_a_category_has_one_colour_in_all_charts(cell):
    """They went by the position, so one more category changed those of all after it."""
    pytest.importorskip("matplotlib")
    few = cell("eager", 100, 1.0, breakdown={"activations": 100 * MIB})
    many = {"activations": 40 * MIB, "beside CUDA graphs": 5 * MIB, "parameters": 40 * MIB}
    more = replace(few, breakdown=many)
    for one in (few, more):
        svg = breakdown_chart("peaks", [("eager", one)])
        assert COLOURS["activations"] in svg
        assert (COLOURS["parameters"] in svg) == (one is more)
    assert part_names([more]) == ["parameters", "activations", "beside CUDA graphs", "unaccounted"]


def test_no_name_is_left_out_of_a_crowded_chart():
    """Those of memfit were, where other names stood."""
    pytest.importorskip("matplotlib")
    names = [f"memfit:{share}% allow=+tiled_loss+step_in_backward" for share in range(60, 66)]
    points = [Point(name, 60 + i / 9, 1.1, True) for i, name in enumerate(names)]
    points += [Point(f"compile:0.{i}", 60 + i / 20, 1.1, False) for i in range(9)]
    svg = memory_and_time("net", [*points, Point("eager", 100, 1.0, False)], [], "time")
    for point in points:
        assert f">{point.label}<" in svg
    for (x, y), (other_x, other_y) in combinations([_place(svg, name) for name in names], 2):
        assert abs(y - other_y) > 7 or abs(x - other_x) > 200


def test_systems_of_a_chart_are_told_apart():
    """The eleventh had the colour and the mark of the first."""
    pytest.importorskip("matplotlib")
    points = [Point("" if number else "eager", 1.0 + number, 1.0, False) for number in range(24)]
    svg = memory_and_time("net", points, [], "time")
    drawn = svg.split('<g id="PathCollection_')[1:]
    looks = {(re.search(r' d="([^"]*)"', d)[1], re.search("#[0-9a-f]{6}", d)[0]) for d in drawn}
    assert len(drawn) == len(looks) == 24


def _place(svg: str, text: str) -> tuple[float, float]:
    """Where a text of a chart stands."""
    (style,) = re.findall(rf"<text ([^>]*)>{re.escape(text)}<", svg)
    found = re.search(r'translate\(([-\d.]+) ([-\d.]+)\)|x="([-\d.]+)" y="([-\d.]+)"', style)
    across, down = filter(None, found.groups())
    return float(across), float(down)


def test_charts_are_whole_svg_and_the_same_each_time(swept):
    pytest.importorskip("matplotlib")
    drawn = charts(swept)
    series = "encoder x128, over the batch size"
    assert [name for name, _ in drawn[series]] == ["peak", "time", "latency", "breakdown-eager"]
    for found in drawn.values():
        for _, svg in found:
            assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert charts(swept) == drawn
    assert "memfit:65%: out of memory" in drawn[series][0][1]
    assert [name for name, _ in drawn["encoder@4x128"]] == ["pareto", "breakdown"]


def test_what_takes_far_longer_stands_at_the_edge_with_its_number():
    pytest.importorskip("matplotlib")
    near = [Point("memfit:60%", 60, 1.1, True), Point("eager", 100, 1.0, False)]
    slow = Point("offload-flags", 40, 29.13, False)
    svg = memory_and_time("resnet", [*near, slow], [(40, 29.13), (60, 1.1), (100, 1.0)], "time")
    assert ">offload-flags: 29.1<" in svg
    ticks = [float(number) for number in re.findall(r">(\d\.\d+)<", svg)]
    assert ticks and max(ticks) < 2  # the others are told apart
    assert ">offload-flags<" in memory_and_time("resnet", [slow], [], "time")


def test_a_chart_of_cells_that_all_died_can_be_drawn(swept, report):
    pytest.importorskip("matplotlib")
    dead = [replace(c, status=OUT_OF_MEMORY, peak_bytes=None, step_s=None) for c in swept.cells]
    ((series, specs),) = series_of(swept).items()
    for over in OVER_BATCH:
        svg = sweep_chart(replace(swept, cells=tuple(dead)), series, specs, over)
        assert "eager: out of memory" in svg


def test_times_over_the_batch_size_were_milliseconds_of_different_processes(swept):
    """Which the report itself says not to compare: on a slower clock all of a system's look slow.

    Drawn are ratios to the eager step of the same process; a chart of latency says what it is.
    """
    pytest.importorskip("matplotlib")

    def slower(times):
        """The cell as a machine would have measured it that takes so many times as long."""

        def changed(cell):
            if not cell.ok:
                return cell
            base = cell.reference
            seconds = {"step_s": base.step_s * times, "again_s": base.again_s * times}
            return replace(cell, step_s=cell.step_s * times, reference=replace(base, **seconds))

        cells = [changed(c) if c.system == "memfit:65%" else c for c in swept.cells]
        return dict(charts(replace(swept, cells=tuple(cells)))[series])

    series = "encoder x128, over the batch size"
    first, second = slower(1), slower(4)  # powers of two: the same ratios to the last bit
    assert first["time"] == second["time"] and first["latency"] != second["latency"]
    words = " ".join(re.findall("<text [^>]*>([^<]*)<", first["time"]))
    assert "as a ratio to the eager step beside it" in words and "eager again (A/A)" in words
    words = " ".join(re.findall("<text [^>]*>([^<]*)<", first["latency"]))
    assert "in ms, each system in a process of its own: compare ratios" in words


def test_ratios_over_the_batch_size_have_their_intervals_and_no_other_reference(swept):
    pytest.importorskip("matplotlib")
    ((series, specs),) = series_of(swept).items()
    (time,) = [over for over in OVER_BATCH if over.one]
    rounds = ByRounds(1.1, 1.05, 1.3)
    cells = [replace(c, by_rounds=rounds) if c.ok else c for c in swept.cells]
    svg = sweep_chart(replace(swept, cells=tuple(cells)), series, specs, time)
    assert "where it lies in 19 of 20 cases" in svg
    assert "where it lies" not in sweep_chart(swept, series, specs, time)
    beside = replace(cells[-1], reference=replace(cells[-1].reference, kind="unplanned"))
    svg = sweep_chart(replace(swept, cells=(*cells[:-1], beside)), series, specs, time)
    assert f"{beside.system}: no eager step beside it" in svg


def test_the_parts_of_a_peak_did_not_say_that_they_are_predicted(swept):
    for text in (markdown(swept), page(swept, {})):
        assert text.count("The parts are predicted") == 2, "one for each batch size"
        assert "Unaccounted is the measured peak less all parts" in text


def test_without_matplotlib_there_is_a_hint(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="--no-charts"):
        check_charts()
