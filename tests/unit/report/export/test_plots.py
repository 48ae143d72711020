"""What plots for papers say."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.report.export.plots import phase_starts, write_plots
from memfit.report.html.chart_data import curve_data
from memfit.report.run_report import RunReport

pytest.importorskip("matplotlib", reason="plots need matplotlib")


def test_strategies_of_a_plot_say_what_they_do(run: RunReport, tmp_path: Path) -> None:
    """The page said "(recompute)" and "(offload)", and plots did not: unlike plans looked alike."""
    write_plots(run, tmp_path)
    drawn = (tmp_path / "budgets.svg").read_text()
    data = curve_data(run)
    assert data is not None
    names = [series["name"] for series in data["series"] if series["points"]]
    assert any("(recompute" in name for name in names)
    for name in names:
        assert f">{name}<" in drawn


def test_memory_over_time_has_marks_where_phases_begin(run: RunReport, tmp_path: Path) -> None:
    """Nothing said where the forward ends."""
    starts = dict(phase_starts(run.before))
    assert list(starts) == ["forward", "backward", "optimizer"]
    assert 0 == starts["forward"] < starts["backward"] < starts["optimizer"] < run.before.seconds
    write_plots(run, tmp_path)
    drawn = (tmp_path / "memory.svg").read_text()
    assert all(drawn.count(f">{phase}<") == 2 for phase in starts)  # before and after
