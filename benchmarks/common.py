"""What the benchmarks share: a report file that a cut-off run goes on with, and its heading."""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import memfit
from memfit.bench.machine import held_clock
from memfit.measure.device import device_facts
from memfit.verify.deterministic import CUBLAS

MIB = 2**20


def load_report(path: Path, *sections: str) -> dict[str, Any]:
    """The report in the file, or an empty one of this machine with these sections."""
    if path.exists():
        report: dict[str, Any] = json.loads(path.read_text())
        if (report["machine"].get("clock") or "free") != "free":  # as in the rows that are there
            _lock_clock()
        return report
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    facts = device_facts(device)
    return {
        "machine": {
            "gpu": facts.name,
            "clock": _lock_clock(),
            "driver": facts.driver,
            "torch": facts.torch,
            "python": platform.python_version(),
            "memfit": memfit.__version__,
            "cublas": os.environ.get(CUBLAS),
        },
        "command": _command(sys.argv),
        **{section: {} for section in sections},
    }


def arguments_of(
    description: str | None, output: str, names: Iterable[str]
) -> argparse.ArgumentParser:
    """A parser for the file to write and the names to run."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("-o", "--output", type=Path, default=Path(output))
    parser.add_argument("--only", nargs="*", default=list(names), metavar="NAME")
    return parser


def save_report(path: Path, report: dict[str, Any], table: str) -> None:
    """Write the report as JSON, and its tables beside it."""
    path.write_text(json.dumps(report, indent=1) + "\n")
    path.with_suffix(".md").write_text(table)


def fill(
    path: Path,
    section: str,
    names: Iterable[str],
    make: Callable[[str], Any],
    markdown: Callable[[dict[str, Any]], str],
) -> None:
    """Make what the report in the file lacks, row by row, and print its tables."""
    report = load_report(path, section)
    add_command(report)
    for name in names:
        if name not in report[section]:
            say(name)
            report[section][name] = make(name)
            save_report(path, report, markdown(report))
            gc.collect()
            torch.cuda.empty_cache()
    print(markdown(report))


def add_command(report: dict[str, Any]) -> None:
    """Name this run's command in a report that an earlier run began."""
    command = _command(sys.argv)
    if command not in report["command"].split("; "):
        report["command"] += f"; {command}"


def say(text: str) -> None:
    """Tell how far a run has come, apart from its results."""
    print(text, file=sys.stderr, flush=True)


def heading(title: str, report: dict[str, Any]) -> list[str]:
    """The first lines of a report in Markdown: machine, versions, command, units."""
    machine = report["machine"]
    return [
        f"# {title}",
        "",
        f"{machine['gpu']}, driver {machine['driver']}, torch {machine['torch']}, "
        f"Python {machine['python']}{_settings_text(machine)}. Command: `{report['command']}`",
        "",
        "MB is 2^20 bytes. Peaks are live bytes of the whole step; reserved is what the process "
        "held under the cap.",
        *(("", report["note"]) if "note" in report else ()),
        "",
    ]


def _lock_clock() -> str | None:
    """Hold the GPU's clock until the run ends; None without a GPU, "free" without the right to."""
    if not torch.cuda.is_available():
        return None
    held = ExitStack()
    atexit.register(held.close)
    return held.enter_context(held_clock("cuda"))


def _settings_text(machine: dict[str, Any]) -> str:
    clock = f", clock {machine['clock']}" if machine.get("clock") else ""
    # Torch reads it at every matrix product, which costs the host some time.
    return clock + (f", {CUBLAS}={machine['cublas']}" if machine.get("cublas") else "")


def _command(words: list[str]) -> str:
    """The command line, without the file it writes to: that is a place on one machine."""
    kept = [f"benchmarks/{Path(words[0]).name}"]
    rest = iter(words[1:])
    for word in rest:
        if word in ("-o", "--output"):
            next(rest, None)
        else:
            kept.append(f'"{word}"' if " " in word else word)
    return " ".join(["PYTHONPATH=src", "python3", *kept])
