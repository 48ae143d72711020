"""Run one cell in a process of its own, and say how it ended whatever happens to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import memfit
from memfit.bench.cell import CellSpec
from memfit.ir.bench import CRASHED, TIMED_OUT, Cell
from memfit.ir.codec import from_data, to_data


def run_in_process(spec: CellSpec, timeout_s: float, log: Path | None = None) -> Cell:
    """The cell's own result, or one that tells how its process died. Ctrl-C ends it, too.

    Its output goes to `log`, if that is given.
    """
    with tempfile.TemporaryDirectory(prefix="memfit-bench-") as folder:
        asked, told, said = (Path(folder) / name for name in ("spec", "cell", "said"))
        asked.write_text(json.dumps(to_data(spec)), encoding="utf-8")
        begun = time.monotonic()
        with said.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "memfit.bench.cell", str(asked), str(told)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,  # what it starts, such as compilers, ends with it
            )
            try:
                code: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
                _end(process)
            except BaseException:
                _end(process)
                raise
        seconds = time.monotonic() - begun
        text = said.read_text(encoding="utf-8", errors="replace")
        if log is not None:
            with log.open("a", encoding="utf-8") as file:
                file.write(f"== {spec.workload.name} | {spec.system}\n{text}\n")
        if code == 0 and told.exists():
            return from_data(Cell, json.loads(told.read_text(encoding="utf-8")))
        name, system = spec.workload.name, spec.system
        if code is None:
            why = f"still running after {timeout_s:.0f} s ({_last_line(text)})"
            return Cell(name, system, TIMED_OUT, why, seconds)
        return Cell(name, system, CRASHED, f"{_death(code)} ({_last_line(text)})", seconds)


def _environment() -> dict[str, str]:
    """This process's, with the memfit that runs here on the path."""
    source = str(Path(memfit.__file__).resolve().parents[1])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def _end(process: subprocess.Popen[Any]) -> None:
    """End the process and everything in its session. It was not waited for yet, so it is there."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _death(code: int) -> str:
    if code >= 0:
        return f"the process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    often = "; the system may have run out of host memory" if name == "SIGKILL" else ""
    return f"the process was ended by signal {name}{often}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"its last words: {lines[-1][:200]}" if lines else "it said nothing"
