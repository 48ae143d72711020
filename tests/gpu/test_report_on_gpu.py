"""A report of a fit on a GPU: its categories sum to what the allocator measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from memfit.cli.app import app

SIZES = {"n_layer": 6, "n_embd": 256, "n_head": 4, "n_ff": 1024, "vocab_size": 2000}


@pytest.mark.parametrize("options", [(), ("--allow", "+offload", "--executor", "graph")])
def test_categories_sum_to_the_measured_peaks(options: tuple[str, ...], tmp_path: Path) -> None:
    sizes = [word for name, n in SIZES.items() for word in ("--set", f"{name}={n}")]
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    words = ["report", "encoder", *sizes, "--batch", "32", "--seq", "256", "--device", "cuda"]
    words += ["--budget", "75%", "--points", "2", "--curve", "optimal", *options]
    result = CliRunner().invoke(app, [*words, "-o", str(page), "--trace", str(trace), "--json"])
    assert result.exit_code == 0, result.output
    said: dict[str, Any] = json.loads(result.stdout)
    for when in ("before", "after"):
        total = sum(said[when]["categories"].values())
        assert total == said[when]["peak_bytes"]
        assert total == pytest.approx(said[when]["measured_peak_bytes"], rel=0.02)
        assert said[when]["categories"]["optimizer_state"] > 0
    assert json.loads(trace.read_text())["traceEvents"] and page.stat().st_size > 50_000
