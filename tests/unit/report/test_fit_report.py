"""The report of a fit says what was promised and what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from memfit.ir.profile import CopyRates
from memfit.ir.result import Numerics
from memfit.ir.swap import SwapStatistics, Traffic
from memfit.report.fit import Option, choices_table, fit_report, summary_line

MIB = 2**20


def text(renderables: list, width: int = 100) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        for renderable in renderables:
            console.print(renderable)
    return captured.get()


def test_prediction_measurement_and_baseline_stand_side_by_side(result, plan):
    lines = text(fit_report(result, plan)).splitlines()
    rows = {line.strip().split("  ")[0]: line.split() for line in lines if line.strip()}
    assert rows["peak memory"][2:] == "38.00 MiB 37.00 MiB 50.00 MiB".split()
    assert rows["reserved memory"][2:] == "39.00 MiB 39.00 MiB 52.00 MiB".split()
    assert rows["step time"][2:] == "110.0 ms 112.0 ms ± 1.0 ms 100.0 ms".split()
    assert rows["time / baseline"][3:] == "1.100x 1.120x 1.004x of itself".split()
    assert "note: one choice" in lines


def test_reserved_memory_is_left_out_on_the_cpu(result, plan):
    on_cpu = replace(result, device={"type": "cpu", "name": "x"})
    assert "reserved" not in text(fit_report(on_cpu, plan))


def test_a_simulated_baseline_is_said_to_be_one(result, plan):
    simulated = replace(
        result,
        baseline=replace(result.baseline, measured=False),
        measured=replace(result.measured, time_ratio=None, same_code_ratio=None),
    )
    shown = text(fit_report(simulated, plan))
    assert "baseline (simulated)" in shown
    assert "1.120x" in shown and "of itself" not in shown


def test_decisions_and_executors_are_counted(result, mixed):
    shown = " ".join(text(fit_report(result, mixed), 200).split())
    assert "2 of 7 segments recomputed whole, 2 in part, 3 kept: 11 of 22 tensors" in shown
    assert "executor graph for 5 segments, module for 2 segments" in shown
    assert "note: not captured, run by module: stem: it branches on data" in shown


def test_what_was_copied_stands_beside_what_was_expected(result, moving):
    lane = Traffic(bytes=20 * MIB, copies=8, busy_s=0.004, stalled_s=0.001, stalls=2)
    swap = SwapStatistics(4, 8, 8, 0, 0, lane, lane, 9 * MIB, 8 * MIB)
    shown = " ".join(text(fit_report(replace(result, swap=swap), moving), 200).split())
    assert (
        "copies 5.00 MiB to the host at 5.2 GB/s, 5.00 MiB back at 5.2 GB/s each batch; "
        "8.00 MiB of 9.00 MiB host memory used" in shown
    )
    assert (
        "waiting 500.0 us each batch in 1 wait for 2.0 ms of copying, 75% hidden; predicted: "
        "4.0 ms of copying, 1.0 ms waited for (75% hidden)" in shown
    )


def test_a_fit_that_moved_nothing_says_why_where_it_might_have(result, plan):
    shown = " ".join(text(fit_report(result, plan, CopyRates(1e9, 1e9)), 200).split())
    assert "copies nothing is moved to the host, recomputing is cheaper here" in shown
    assert "to the host" not in text(fit_report(result, plan))


def test_choices_show_what_goes_to_the_host(plan, moving):
    options = [Option("tight", 35 * MIB, moving), Option("roomy", 45 * MIB, plan)]
    lines = text([choices_table(options)], 80).splitlines()
    assert "to host" in lines[2]
    assert lines[4].split()[-4:] == ["7.00", "MiB", "--budget", str(35 * MIB)]
    assert max(map(len, lines)) <= 80
    assert "to host" not in text([choices_table(options[1:])])


def test_summary_is_one_line(result):
    assert str(summary_line(result, "memfit plan net --sweep")) == (
        "budget 40.00 MiB; peak 37.00 MiB (predicted 38.00 MiB); time 1.120x baseline; "
        "numbers identical; next: memfit plan net --sweep"
    )


@pytest.mark.parametrize(
    "numerics, kept, word",
    [
        (Numerics(True, 0.0, 0.0, agree=True), True, "numbers identical"),
        (Numerics(False, 0.1, 0.2, agree=False), False, "NOT identical"),
        (
            Numerics(False, 0.1, 0.2, agree=False, note="the unplanned step does not fit"),
            False,
            "NOT identical",
        ),
        (
            Numerics(False, 0.1, 0.2, {"planned": 0.1, "unplanned": 0.1}, agree=True),
            True,
            "numbers as exact as unplanned",
        ),
        (
            Numerics(False, 0.1, 0.2, {"planned": 1.4, "unplanned": 1.4}, agree=True),
            True,
            "numbers not judged (they differ by 0.2; full precision is no measure)",
        ),
        (
            Numerics(False, 0.1, 0.2, {"planned": 0.3, "unplanned": 0.1}, agree=False),
            False,
            "NOT identical",
        ),
        (
            Numerics(False, 0.1, 0.2, repeatable=False, note="it does not repeat itself"),
            True,
            "not comparable",
        ),
    ],
)
def test_verdict_on_numbers(result, numerics, kept, word):
    assert numerics.kept is kept
    assert word in str(summary_line(replace(result, numerics=numerics), ""))
