"""The HTML report: what is in the file, and that it needs nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from memfit.errors import PlanFileError
from memfit.ir.ended import INFEASIBLE, NoResult
from memfit.ir.plan import TechniqueChoice
from memfit.ir.result import ReferenceResult
from memfit.planning.simulate import Simulator
from memfit.planning.write_plan import HAS_ROOM, NO_ROOM, read_acts, without_room
from memfit.report.html.chart_data import curve_data
from memfit.report.html.ended import ended_page
from memfit.report.html.facts import (
    categories,
    category_checks,
    comparison,
    reference_lines,
    tiles,
)
from memfit.report.html.page import html_page, page_data, script_json
from memfit.report.html.table_data import decision_table, segment_table
from memfit.report.run_report import EndedReport, RunReport


class Text(HTMLParser):
    """The words of each section by its id, and everything that a page could load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sections: dict[str, str] = {}
        self.loads: list[str] = []
        self._section = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "section":
            self._section = found.get("id") or found.get("aria-label") or ""
        self.loads += [v for name, v in attrs if name in ("src", "href", "action", "srcset") and v]

    def handle_data(self, data: str) -> None:
        self.sections[self._section] = self.sections.get(self._section, "") + data


def test_categories_sum_to_the_measured_peak_within_two_percent_on_cuda(planned: RunReport) -> None:
    charts = page_data(planned)["memory"]["charts"]
    assert planned.profile.device.type == "cuda"
    measured = charts[0]["measured"]
    assert measured == planned.profile.baseline.peak_bytes
    for chart, replay in zip(charts, (planned.before, planned.after), strict=True):
        tensors, position = chart["tensors"], replay.peak_position
        columns = [tensors[name] for name in ("bytes", "category", "start", "end")]
        alive = [
            (size, category)
            for size, category, start, end in zip(*columns, strict=True)
            if start <= position < end
        ]
        by_category = {c: sum(s for s, k in alive if k == c) for c in {k for _, k in alive}}
        assert sum(by_category.values()) == chart["peak"] == replay.peak_bytes
    assert charts[0]["peak"] == pytest.approx(measured, rel=0.02)
    assert charts[1]["peak"] == planned.plan.predicted.peak_bytes


def test_the_page_loads_nothing(run: RunReport) -> None:
    page = html_page(run)
    text = Text(page)
    assert text.loads == ["data:,"]
    assert not re.findall(r"@import|url\(", page)
    urls = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert urls == {"http://www.w3.org/2000/svg"}  # the name of SVG: nobody goes there


def test_the_page_of_a_fit_without_memory_loads_nothing(ended: EndedReport) -> None:
    page = ended_page(ended)
    text = Text(page)
    assert text.loads == ["data:,"] and "<script" not in page
    assert not re.findall(r"@import|url\(|https?:", page)
    far, live = (" ".join(text.sections[name].split()) for name in ("how-far", "live"))
    assert "warming up: out of memory, in backward at <b>" in far and "500.0 ms" in far
    assert "3.00 GiB of 8.00 GiB" in live and "parameters" in live and "a <tensor>" in live
    assert "memfit fit 'a <b>'" in text.sections["commands"]


def test_a_fit_that_failed_after_its_profile_has_both(run: RunReport, ended: EndedReport) -> None:
    sections = Text(html_page(replace(run, result=None, refused=ended.refused))).sections
    assert {"how-far", "live", "memory", "segments"} <= set(sections)
    assert "how-far" not in Text(html_page(run)).sections


def test_the_page_is_small(run: RunReport) -> None:
    assert len(html_page(run).encode()) < 600_000


def test_everything_that_was_promised_is_in_the_page(run: RunReport) -> None:
    sections = Text(html_page(run)).sections
    assert set(sections) >= {"memory", "curve", "segments", "decisions", "environment", "commands"}
    assert "NVIDIA H200" in sections["environment"] and "2.11.0" in sections["environment"]
    assert "Python" not in sections["environment"], "it is of before that was stored"
    device = replace(run.profile.device, host="Python 3.12.3, Linux x86_64, 16 cores")
    stored = replace(run, profile=replace(run.profile, device=device))
    assert device.host in Text(html_page(stored)).sections["environment"]
    assert "memfit report --profile 'a <b> & c.json'" in sections["commands"]
    assert "memfit fit transformers:gpt2-large" in sections["commands"]
    words = " ".join(sections["comparison"].split())
    assert "peak memory" in words and "held by the allocator" in words and "1.257x" in words


def test_what_was_not_run_is_marked(planned: RunReport) -> None:
    rows = {row[0]: row for row in comparison(planned)}
    assert all(row[3] == "not measured" for row in rows.values())
    assert tiles(planned)[3].value == "not measured"
    assert category_checks(planned)[1] == "after: not measured"


def test_predictions_stand_beside_measurements(run: RunReport) -> None:
    rows = {row[0]: row for row in comparison(run)}
    assert rows["peak memory"][4] == "-0.10%"
    assert rows["step time"][3] == "220.0 ms ± 2.0 ms"
    assert run.result is not None
    apart = run.plan.predicted.step_s / run.result.measured.step_s - 1
    assert rows["step time"][4] == f"{apart:+.1%}" != "", "it was always left out"
    assert rows["time / before"][1] == "A/A 1.001x"
    assert [tile.tone for tile in tiles(run)] == ["good", "", "", "good"]


def test_steps_without_memfit_were_left_out_where_they_were_measured(run: RunReport) -> None:
    assert run.result is not None
    assert reference_lines(run) == [] and "Without memfit" not in html_page(run)
    eager = ReferenceResult(24 * 2**30, 25 * 2**30, 0.2, 0.001, 1.1)
    compiled = ReferenceResult(why_not="no <compiler> here.")
    result = replace(run.result, references={"eager": eager, "compiled": compiled})
    words = Text(html_page(replace(run, result=result))).sections["comparison"]
    assert (
        "Without memfit, eager: 200.0 ms ± 1.0 ms, peak 24.00 GiB; the planned step takes 1.100x "
        "its time." in words
    )
    assert "Without memfit, compiled: not measured: no <compiler> here.\n" in words
    only = replace(run.result, references={"eager": eager, "compiled": None})
    assert len(reference_lines(replace(run, result=only))) == 1, "that one was not asked for"


def test_the_example_had_scripts_that_are_no_longer_those_of_reports(run: RunReport) -> None:
    """One fix after another did not come to the page that the README shows."""
    example = Path(__file__).parents[4] / "docs" / "examples" / "gpt2-large-16GB.html"
    code = re.compile(r"<(style|script)>\n(.*?)</\1>", re.DOTALL)
    there, here = (code.findall(text) for text in (example.read_text("utf-8"), html_page(run)))
    assert [kind for kind, _ in here] == ["style", "script"]
    assert there == here, "make it anew, by the command that stands at its end"


def test_a_fit_that_changed_numbers_says_so(run: RunReport) -> None:
    assert run.result is not None
    numerics = replace(
        run.result.numerics, bitwise_vs_unplanned=False, agree=False, grad_max_rel_diff=0.5
    )
    bad = replace(run, result=replace(run.result, numerics=numerics))
    tile = tiles(bad)[3]
    assert (tile.value, tile.tone) == ("NOT identical", "bad") and "0.5" in tile.detail


def test_categories_are_listed_with_their_sum(run: RunReport) -> None:
    rows = categories(run)
    assert [row.category for row in rows[:2]] == ["parameters", "optimizer_state"]
    assert rows[-1].name == "all together" and rows[-1].before == "23.44 GiB"
    assert max(row.before_share for row in rows) < 100


def test_segments_have_variant_bytes_seconds_and_why(run: RunReport) -> None:
    columns = {c["title"]: c for c in segment_table(run)["columns"]}
    assert len(columns["segment"]["values"]) == len(run.plan.segments)
    assert {"variant", "saved", "recomputed", "added", "why"} <= columns.keys()
    assert "offloaded" not in columns, "a column of zeros says nothing"
    assert sum(columns["recomputed"]["values"]) == run.plan.recomputed_bytes


def test_every_tensor_has_a_decision_and_captured_ones_a_line(run: RunReport) -> None:
    columns = {c["title"]: c for c in decision_table(run)["columns"]}
    words = columns["source"]["strings"]
    assert any("modeling_gpt2.py:" in text for text in words)
    assert set(columns["decision"]["strings"]) == {"keep", "recompute"}


def test_techniques_are_listed_with_why(run: RunReport) -> None:
    choices = (
        TechniqueChoice("tiled_loss", True, "the fastest", 10 * 2**20, 0.001),
        TechniqueChoice("microbatch", False, "not needed"),
    )
    page = html_page(replace(run, plan=replace(run.plan, choices=choices)))
    words = Text(page).sections["plan"]
    assert "tiled_losstaken10.00 MiB1.0 msthe fastest" in words
    assert "microbatchleft outnot triednot triednot needed" in words


def test_no_string_ends_the_script(run: RunReport) -> None:
    evil = "</script><script>alert(1)</script><!-- &amp;"
    text = script_json({"name": evil})
    assert "<" not in text and json.loads(text) == {"name": evil}
    segments = (replace(run.plan.segments[0], reason=evil), *run.plan.segments[1:])
    workload = {**run.profile.workload, "name": evil, "model": evil}
    made = replace(
        run,
        plan=replace(run.plan, segments=segments),
        profile=replace(run.profile, workload=workload),
    )
    assert html_page(made).count("<script") == 2


def test_the_nearest_plan_stands_at_what_it_takes(run: RunReport) -> None:
    """It was ringed as this plan at the budget that it does not hold."""
    refused = NoResult(INFEASIBLE, "no plan fits", None, 1, budget_bytes=10**9)
    plan = replace(run.plan, budget_bytes=10**9)
    found = curve_data(replace(run, plan=plan, result=None, refused=refused))
    assert found is not None and found["budget"] == 10**9
    assert found["chosen"]["budget"] == run.plan.predicted.reserved_bytes > 10**9
    assert found["chosen"]["name"].startswith("nearest plan")
    nearest = without_room(plan.segments)
    rooms = [s.reason == HAS_ROOM for s in plan.segments]
    assert any(rooms) and [s.reason == NO_ROOM for s in nearest] == rooms
    held = curve_data(run)
    assert held is not None and held["chosen"]["budget"] == held["budget"] == run.plan.budget_bytes
    assert held["chosen"]["name"] == "this plan"


def test_a_report_without_a_curve_has_no_place_for_one(run: RunReport) -> None:
    made = replace(run, curve=())
    assert "curve" not in Text(html_page(made)).sections
    assert page_data(made)["curve"] is None


def test_a_plan_that_keeps_tensors_of_no_graph_is_refused(run: RunReport) -> None:
    """A KeyError, where the graph's nodes have other names."""
    variants = tuple(replace(v, saved=("nothing",), offloaded=()) for v in run.plan.variants)
    plan = replace(run.plan, variants=variants)
    partial = [replace(s, decision="partial") for s in plan.segments if s.variant is not None]
    plan = replace(plan, segments=(*plan.segments[: -len(partial)], *partial))
    with pytest.raises(PlanFileError, match="keeps 'nothing'") as caught:
        read_acts(Simulator(run.profile), plan)
    assert caught.value.hint
