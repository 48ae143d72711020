"""What the benchmarks share: options, a report file that a cut-off run goes on with, its heading.

A benchmark is a list of units, the most telling first. Each is saved as it ends; what the file has
is not run again, what failed is. `--time-limit` starts none that would not end in time,
`--estimate` says how long the missing ones take, `--tiny` tries it out with models of a few layers.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import memfit
from memfit.bench.machine import FREE
from memfit.bench.order import UNKNOWN_CELL_S
from memfit.measure.device import device_facts
from memfit.verify.deterministic import CUBLAS

MIB = 2**20
Report = dict[str, Any]
Row = dict[str, Any]
# Not compared: of the same GPU and torch, other drivers and host machines may go on with a file.
SAME = ("gpu", "torch", "clock")
TINY_S = 5.0  # of a unit with a tiny model
_BEGUN = time.monotonic()


@dataclass(frozen=True)
class Unit:
    """One row of the report: where it goes, how to get it, and about how long that takes."""

    rows: MutableMapping[str, Any]
    key: str
    run: Callable[[], Row]
    label: str  # in what is said, and among the report's seconds
    seconds: float | None = None  # on an H200; None: as long as a cell of `memfit bench`

    @property
    def missing(self) -> bool:
        """Whether it has to be run: a row that says why it failed is tried again."""
        row = self.rows.get(self.key)
        return not row or "error" in row


def parser_of(
    description: str | None, output: str, names: Iterable[str]
) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has; `names` are what --only chooses from."""
    known = list(names)
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, default=Path(output), help="JSON file")
    parser.add_argument(
        "--only", nargs="+", choices=known, default=known, metavar="NAME", help=", ".join(known)
    )
    parser.add_argument("--steps", type=int, default=10, help="steps of each kind to time")
    parser.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="for all units together"
    )
    parser.add_argument("--estimate", action="store_true", help="only say how long it takes")
    parser.add_argument("--tiny", action="store_true", help="models of a few layers, to try it out")
    return parser


def same_precision() -> None:
    """Let float32 products be shortened, for every system alike."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True


def open_report(arguments: argparse.Namespace, *sections: str, elsewhere: bool = False) -> Report:
    """The report in the file, or an empty one of this machine with these sections.

    Refuses a file of another machine, unless what is added comes from no machine (`elsewhere`).
    """
    same_precision()
    path: Path = arguments.output
    path.parent.mkdir(parents=True, exist_ok=True)
    report = json.loads(path.read_text()) if path.exists() else {}
    here = _machine()
    there = report.setdefault("machine", here)
    other = [
        f"{k} was {there.get(k)!r} and is {here[k]!r}" for k in SAME if there.get(k) != here[k]
    ]
    if other and not (elsewhere or arguments.estimate):
        raise SystemExit(
            f"{path} has results of another machine: {', '.join(other)}; use another -o"
        )
    if not arguments.estimate and not elsewhere:
        _add_command(report)
    for section in (*sections, "seconds"):
        report.setdefault(section, {})
    return report


def run_units(
    arguments: argparse.Namespace,
    report: Report,
    units: Iterable[Unit],
    markdown: Callable[[Report], str],
) -> None:
    """Run what is missing, save after each, and print the tables.

    With a time limit none is begun that would not end in time; those left are said at the end.
    """
    begun = time.monotonic()
    left: list[tuple[float, Unit]] = []
    for unit in units:
        if not unit.missing:
            continue
        passed = time.monotonic() - begun
        limit_s = arguments.time_limit
        expected = expected_s(unit, report, tiny=arguments.tiny)
        if arguments.estimate or (limit_s is not None and passed + expected > limit_s):
            left.append((expected, unit))
            continue
        say(f"{unit.label} (about {expected:.0f} s)")
        start = time.monotonic()
        unit.rows[unit.key] = _tried(unit)
        report["seconds"][unit.label] = round(time.monotonic() - start, 1)
        save_report(arguments.output, report, markdown(report))
        tidy()
    if not arguments.estimate:
        print(markdown(report))
    for expected, unit in left:
        print(f"left: {expected:6.0f} s  {unit.label}")
    if left:
        print(f"left: {sum(expected for expected, _ in left):6.0f} s  in all")


def expected_s(unit: Unit, report: Report, *, tiny: bool = False) -> float:
    """Seconds that a unit will take: as it took before, else as it says, else as a cell."""
    before: float | None = report["seconds"].get(unit.label)
    said = UNKNOWN_CELL_S if unit.seconds is None else unit.seconds
    return before or (TINY_S if tiny else said)


def _tried(unit: Unit) -> Row:
    """The unit's row; a failure is one, too: the other units are worth having all the same."""
    try:
        return unit.run()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def tidy() -> None:
    """Give back all memory that is held in reserve, pinned memory too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        empty_host_cache()


def empty_host_cache() -> None:
    """Unpin the blocks that torch keeps for the next copy; they count as used host memory."""
    for name in ("_host_emptyCache", "_accelerator_emptyHostCache"):  # 2.11 and 2.13
        if hasattr(torch._C, name):
            getattr(torch._C, name)()
            return


def save_report(path: Path, report: Report, table: str) -> None:
    """Write the report as JSON, and its tables beside it; what was there stays whole until then."""
    for file, text in (
        (path, json.dumps(report, indent=1) + "\n"),
        (path.with_suffix(".md"), table),
    ):
        beside = file.with_name(f"{file.name}.part")
        beside.write_text(text)
        beside.replace(file)


def say(text: str) -> None:
    """Tell how far a run has come and after how long, apart from its results."""
    print(f"{time.monotonic() - _BEGUN:5.0f} s  {text}", file=sys.stderr, flush=True)


def heading(title: str, report: Report) -> list[str]:
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


def _machine() -> dict[str, Any]:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    facts = device_facts(device)
    return {
        "gpu": facts.name,
        "clock": FREE if device.type == "cuda" else None,
        "driver": facts.driver,
        "torch": facts.torch,
        "python": platform.python_version(),
        "memfit": memfit.__version__,
        "cublas": os.environ.get(CUBLAS),
    }


def _settings_text(machine: dict[str, Any]) -> str:
    clock = f", clock {machine['clock']}" if machine.get("clock") else ""
    # Torch reads it at every matrix product, which costs the host some time.
    return clock + (f", {CUBLAS}={machine['cublas']}" if machine.get("cublas") else "")


def _add_command(report: Report) -> None:
    """Name this run's command in the report."""
    command = _command(sys.argv)
    known = report["command"].split("; ") if "command" in report else []
    if command not in known:
        report["command"] = "; ".join([*known, command])


def _command(words: list[str]) -> str:
    """The command line, without where it writes to and for how long: those are of one occasion."""
    kept = [f"benchmarks/{Path(words[0]).name}"]
    rest = iter(words[1:])
    for word in rest:
        if word in ("-o", "--output", "--time-limit"):
            next(rest, None)
        else:
            kept.append(f'"{word}"' if " " in word else word)
    return " ".join(["PYTHONPATH=src", "python3", *kept])
