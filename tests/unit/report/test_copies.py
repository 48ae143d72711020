"""Copies in words: rates, what is expected of a plan's copies, and why there are none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.ir.profile import CopyRates
from memfit.report.copies import measured_lines, planned_line, rates_line, why_nothing_moves

GPU = CopyRates(20e9, 25e9, latency_s=1e-5, drag=0.05)


def test_rates():
    assert rates_line(GPU) == (
        "20.0 GB/s to the host, 25.0 GB/s back, 10.0 us to start one; one second of them adds "
        "50.0 ms to the work beside"
    )
    assert rates_line(replace(GPU, drag=1.0)).endswith("; nothing runs beside them")
    assert rates_line(None).startswith("not measured")


@pytest.mark.parametrize(
    "device, stall_s, words",
    [
        ("cuda", 0.0, "4.0 ms of copying, all of it hidden behind the work"),
        ("cuda", 1e-5, "4.0 ms of copying, all of it hidden behind the work"),
        ("cuda", 1e-3, "4.0 ms of copying, 1.0 ms waited for (75% hidden)"),
        ("cuda", 9e-3, "4.0 ms of copying, 9.0 ms waited for (0% hidden)"),
        ("cpu", 0.0, "4.0 ms of copying, all waited for (a CPU copies or computes)"),
    ],
)
def test_what_a_plan_moves(moving, device, stall_s, words):
    plan = replace(
        moving,
        workload={**moving.workload, "device": device},
        predicted=replace(moving.predicted, stall_s=stall_s),
    )
    assert planned_line(plan) == (
        f"7.00 MiB to the host and back each batch: {words}; 8.00 MiB of host memory"
    )


def test_a_plan_that_moves_nothing_has_no_copies(plan):
    assert planned_line(plan) is None
    assert measured_lines(plan, None) == []


def test_why_nothing_moves(plan, moving):
    # 12 MiB are recomputed for 10 ms.
    assert why_nothing_moves(plan, replace(GPU, out_bytes_per_s=1e9)) == (
        "nothing is moved to the host, recomputing is cheaper here: 10.0 ms for 12.00 MiB, which "
        "take 13.1 ms to copy out and back"
    )
    assert why_nothing_moves(plan, GPU) == (
        "nothing is moved to the host: no faster plan was found that does"
    )
    assert why_nothing_moves(plan.unplanned(), GPU) is None  # strategy none chooses nothing
    kept = replace(plan.unplanned(), strategy="optimal")
    assert why_nothing_moves(kept, GPU) == (
        "nothing is moved to the host: there is room for everything"
    )
    assert why_nothing_moves(moving, GPU) is None
    assert why_nothing_moves(plan, None) is None
    assert why_nothing_moves(replace(plan, strategy="all"), GPU) is None
