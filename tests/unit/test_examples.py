"""The examples run, and show what they say they show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from memfit.ir.memory_series import MemorySeries

ROOT = Path(__file__).resolve().parents[2]


def run_example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run


def test_observe_finds_the_long_step(tmp_path: Path) -> None:
    run = run_example("observe.py", str(tmp_path))
    series = MemorySeries.load(tmp_path / "memory.json")
    assert series.peak.step == 8
    assert 8 in {spike.step for spike in series.identify_spikes(100)}
    assert "spike: step 8" in run.stdout
    assert (tmp_path / "memory.csv").read_text().count("\n") == 1 + 12 * 5
    assert "step 11" in run.stderr, "the live line goes to stderr"
    for component in ("loader", "forward", "backward", "optimizer", "outside of segments"):
        assert component in run.stdout


def test_pressure_moves_tensors_of_the_long_batches_only() -> None:
    lines = run_example("pressure.py").stdout.splitlines()
    moved = [int(line.split()[-3]) for line in lines[:6]]
    assert moved[:2] == moved[4:] == [0, 0]
    assert min(moved[2:4]) > 0
