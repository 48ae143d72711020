"""The report of a plan: like segments joined, categories that sum to the peak."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from memfit.ir.profile import CopyRates
from memfit.report.copies import planned_line, why_nothing_moves
from memfit.report.plan import (
    MOST_ROWS,
    decisions_line,
    executor_line,
    group_segments,
    plan_report,
    segment_table,
    summary_line,
    uncaptured_notes,
)
from memfit.report.sweep import SweepRow, sweep_data, sweep_table
from memfit.report.terminal import budget_word, note_lines, span_name
from memfit.units import parse_bytes

MIB = 2**20


def text(renderable: object, width: int = 100) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_like_neighbours_share_a_row(plan):
    groups = group_segments(plan)
    assert [(g.name, g.decision) for g in groups] == [
        ("stem", "keep: the budget has room"),
        ("blocks.0 .. 3 (4)", "recompute, runs 0 to 1"),
        ("blocks.4 .. 5 (2)", "keep: the budget has room"),
    ]


def test_every_segment_has_a_row_when_asked_for(plan):
    shown = text(segment_table(plan, every=True))
    assert all(s.name in shown for s in plan.segments) and ".." not in shown


def test_long_lists_are_cut_with_a_count(plan):
    rows = range(MOST_ROWS + 7)
    segments = tuple(replace(plan.segments[0], name=f"s{i}", saved_bytes=i) for i in rows)
    many = replace(plan, segments=segments)
    shown = text(segment_table(many, every=False))
    assert "... 7 more rows (--all)" in shown
    assert "s0 " in shown and f"s{rows[-1]} " in shown
    assert "more rows" not in text(segment_table(many, every=True))


def test_segments_planned_inside_say_how_much(mixed):
    groups = group_segments(mixed)
    assert [(g.name, g.decision) for g in groups] == [
        ("stem", "keep: the budget has room"),
        ("blocks.0 .. 1 (2)", "partial: 2 of 4 tensors recomputed, frees 2.00 MiB"),
        ("blocks.2", "keep: the budget has room"),
        ("blocks.3 .. 4 (2)", "recompute, run 0"),
        ("head", "keep: the budget has room"),
    ]
    assert len(group_segments(mixed, every=True)) == 7


def test_neighbours_of_different_variants_stand_apart(mixed):
    segments = list(mixed.segments)
    segments[2] = replace(segments[2], variant=0)
    names = [g.name for g in group_segments(replace(mixed, segments=tuple(segments)))]
    assert names[1:3] == ["blocks.0", "blocks.1"]


def test_facts_count_decisions_and_executors(mixed, plan):
    assert decisions_line(mixed) == (
        "2 of 7 segments recomputed whole, 2 in part, 3 kept: 11 of 22 tensors, "
        "10.00 MiB recomputed, 7.00 MiB kept"
    )
    assert executor_line(mixed) == "graph for 5 segments, module for 2 segments"
    assert executor_line(plan) == "module for 7 segments"
    shown = "".join(text(part, 200) for part in plan_report(mixed, "a GPU", every=False))
    assert decisions_line(mixed) in shown and executor_line(mixed) in shown


def test_what_could_not_be_captured_is_noted_with_its_reason(mixed):
    note = "not captured, run by module: stem: it branches on data"
    assert uncaptured_notes(mixed) == [note]  # nobody expects the head, a single layer
    assert note in "".join(text(part) for part in plan_report(mixed, "a GPU", every=False))
    many = tuple(replace(mixed.segments[0], name=f"s{i}") for i in range(5))
    assert uncaptured_notes(replace(mixed, segments=many)) == [
        "not captured, run by module: s0, s1, s2 and 2 more: it branches on data"
    ]


def test_report_shows_peak_bound_and_minimum(plan):
    shown = "".join(text(part) for part in plan_report(plan, "a GPU", every=False))
    for word in ("38.00 MiB", "52.6%", "30.00 MiB is the smallest", "1.100x", "gap 0.91%"):
        assert word in shown
    assert "reserved" not in shown
    reserved = replace(plan, predicted=replace(plan.predicted, reserved_bytes=39 * MIB))
    shown = "".join(text(part) for part in plan_report(reserved, "a GPU", every=False))
    assert "39.00 MiB predicted" in shown


@pytest.mark.parametrize("width", [80, 100])
def test_tables_keep_within_the_terminal(plan, width):
    for part in plan_report(plan, "a GPU", every=False):
        assert max(map(len, text(part, width).splitlines())) <= width


def test_summary_is_one_line(plan):
    assert str(summary_line(plan, "memfit fit net")) == (
        "budget 40.00 MiB; predicted peak 38.00 MiB; predicted time 1.100x baseline; "
        "next: memfit fit net"
    )


def test_sweep_shows_what_is_not_feasible(plan):
    rows = [SweepRow(35 * MIB, {"none": None}), SweepRow(50 * MIB, {"none": plan})]
    lines = text(sweep_table(rows, 50 * MIB, 0.1)).splitlines()
    assert lines[4].split() == ["35.00", "MiB", "70%", "-", "-", "-", "-"]
    assert lines[5].split()[-3:] == ["4", "of", "7"]
    data = sweep_data(rows)
    assert [row["feasible"] for row in data] == [False, True]
    assert data[1]["predicted"]["slowdown"] == pytest.approx(1.1)
    assert data[1]["num_recomputed"] == 4 and data[1]["num_partial"] == 0


def test_sweep_counts_segments_planned_inside(mixed):
    rows = [SweepRow(50 * MIB, {"optimal": mixed})]
    assert "2 + 2 part of 7" in text(sweep_table(rows, 50 * MIB, 0.1))
    assert sweep_data(rows)[0]["num_partial"] == 2


def test_sweep_shows_what_goes_to_the_host(moving, plan):
    rows = [
        SweepRow(30 * MIB, {"optimal": None}),
        SweepRow(35 * MIB, {"optimal": moving}),
        SweepRow(50 * MIB, {"optimal": plan}),
    ]
    lines = text(sweep_table(rows, 50 * MIB, 0.1)).splitlines()
    assert "to host" in lines[2]
    assert [line.split()[-2:] for line in lines[4:7]] == [["-", "-"], ["7.00", "MiB"], ["0", "B"]]
    assert [row["offloaded_bytes"] for row in sweep_data(rows)] == [None, 7 * MIB, 0]
    assert sweep_data(rows)[1]["predicted"]["stall_s"] == 0.001
    large = replace(moving, segments=moving.segments * 9)
    wide = [SweepRow(2001 * MIB, {"optimal": large})]
    shown = text(sweep_table(wide, 50 * MIB, 0.1), 80)
    assert "18 + 9 part of 63" in shown and "63.00 MiB" in shown and "…" not in shown


def test_offloaded_neighbours_share_a_row_that_says_when_they_come_back(moving):
    groups = group_segments(moving)
    assert [(g.name, g.decision) for g in groups] == [
        ("stem", "keep: the budget has room"),
        ("blocks.0 .. 1 (2)", "offload: sends 2.00 MiB to the host, back 1 to 2 segments ahead"),
        (
            "blocks.2",
            "partial: 1 of 4 tensors recomputed, frees 1.00 MiB; sends 1.00 MiB to the host, "
            "back 1 segment ahead",
        ),
        ("blocks.3 .. 4 (2)", "recompute, run 0"),
        ("head", "offload: sends 2.00 MiB to the host, back from call 6 on"),
    ]
    own = tuple(replace(s, prefetch=i) for i, s in enumerate(moving.segments))
    assert group_segments(replace(moving, segments=own))[1].decision == (
        "offload: sends 2.00 MiB to the host, back when its backward begins"
    )


def test_facts_count_what_is_offloaded(moving):
    assert decisions_line(moving) == (
        "2 of 7 segments recomputed whole, 1 in part, 3 offloaded, 1 kept: 8 of 22 tensors, "
        "7.00 MiB recomputed, 6 tensors, 7.00 MiB offloaded, 5.00 MiB kept"
    )
    shown = "".join(text(part, 200) for part in plan_report(moving, "a GPU", every=False))
    assert decisions_line(moving) in shown and planned_line(moving) in shown


def test_a_plan_that_moves_nothing_says_why_where_it_might_have(plan):
    rates = CopyRates(1e9, 1e9)
    reason = why_nothing_moves(plan, rates)
    shown = "".join(text(part, 200) for part in plan_report(plan, "a GPU", rates, every=False))
    assert reason is not None and reason in shown
    shown = "".join(text(part, 200) for part in plan_report(plan, "a GPU", every=False))
    assert "to the host" not in shown


def test_spans_notes_and_budgets_as_words():
    assert span_name("a.b.0", "a.b.11") == "a.b.0 .. 11"
    assert span_name("a.b.0", "a.c.0") == "a.b.0 .. a.c.0"
    assert span_name("x", "x") == "x" and span_name("x", "y") == "x .. y"
    assert len(note_lines(["n"] * 9)) == 7
    for size in (1, 12_345, 99 * MIB, 100 * MIB + 1, 7 * 2**30 + 5):
        assert size <= parse_bytes(budget_word(size)) <= size + MIB
