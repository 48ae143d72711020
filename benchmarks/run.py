"""Run the benchmarks of README.md one after another, as many as there is time for.

    PYTHONPATH=src python3 benchmarks/run.py --minutes 25 --ahead 7 --tests valve pays

Names are those of the README's table; without any, all of them run, in its order. Each writes
NAME-GPU.json and its Markdown, and goes on where an earlier run was cut off. First, at once and
untimed: with --ahead the whole models of the peers are compiled, by so many processes, and with
--tests the tests that need a GPU run. Then each run has the machine to itself, or, with --at-once,
as long as it is being timed: of those that run side by side the others stand still meanwhile. A
line says how far it has come; logs lie beside the results, which belong into benchmarks/results
when they are whole.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from inside import WORKLOADS as COMPARED
from workloads import WORKLOADS

from memfit.bench.machine import machine_facts
from memfit.bench.workloads import SUITES
from memfit.ir.bench import BenchReport
from memfit.measure import turns

HERE = Path(__file__).parent
# Systems worth compiling ahead.
COMPILED = ("compile", "blocks", "checkpoint-compiled", "offload-flags")
CELLS_AT_ONCE = 2  # of `memfit bench`, where runs go side by side
COLD = ("setup",)  # what asks how long compiling takes must not find anything compiled
GOES_ON = {"simulated": "pays"}  # in the file of another
SPARE_S = 15.0  # for a script to end
LONGEST_AHEAD_S = 240.0  # what compiles for longer is left to the run itself, or fails there


@dataclass(frozen=True)
class Run:
    """A row of the README's table."""

    name: str
    words: tuple[str, ...]  # the script and its options

    def command(self, output: Path, more: Sequence[str]) -> list[str]:
        """What to start."""
        script, *options = self.words
        start = ["-m", "memfit"] if script == "memfit" else [str(HERE / Path(script).name)]
        options = [*options, "--no-charts"] if script == "memfit" else options
        return [sys.executable, *start, *options, "-o", str(output), *more]

    @property
    def systems(self) -> list[tuple[str, str]]:
        """The workloads and peers whose compiled code is found again."""
        workloads, peers = _after("--only", self.words), _after("--peers", self.words)
        if self.words[0] == "memfit":
            suites = [SUITES[name] for name in _after("--suite", self.words)]
            patterns = ",".join(_after("--workloads", self.words)) or "*"
            workloads = (
                workload.name
                for suite in suites
                for workload in suite.workloads
                if any(fnmatchcase(workload.name, pattern) for pattern in patterns.split(","))
            )
            named = ",".join(_after("--systems", self.words))
            usual = (peer for suite in suites for peer in suite.systems)
            peers = iter(named.split(",")) if named else usual
        elif Path(self.words[0]).stem != "inside":
            return []
        compiled = [peer for peer in peers if peer.split(":")[0] in COMPILED]
        return [(name, peer) for name in workloads for peer in compiled if name in WORKLOADS]


def read_runs(text: str) -> dict[str, Run]:
    """The runs of the README's table, by name."""
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    found = {}
    for row in rows:
        name = row[0].strip("| `")
        found[name] = Run(name, tuple(shlex.split(row[2].strip("`"))))
    return found


def main() -> None:
    """Run what was asked for."""
    runs = read_runs((HERE / "README.md").read_text())
    arguments = parse_arguments(runs)
    chosen = [runs[name] for name in arguments.names]
    if arguments.list:
        for run in chosen:
            print(f"{run.name:16} {shlex.join(run.words)}")
        return
    begun = time.monotonic()
    end = begun + 60 * arguments.minutes
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    failed = _one_by_one if arguments.at_once == 1 else _side_by_side
    names = failed(chosen, arguments, begun, end)
    if names:
        sys.exit(f"not whole: {', '.join(names)} (see {folder}/*.log; the same command goes on)")


def parse_arguments(runs: dict[str, Run], words: list[str] | None = None) -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(runs))
    parser.add_argument("--minutes", type=float, default=600.0, help="for everything together")
    parser.add_argument("--ahead", type=int, default=0, metavar="N", help="compile, N at once")
    parser.add_argument("--tests", action="store_true", help="run tests/gpu meanwhile")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="so many side by side, timed in turns"
    )
    parser.add_argument(
        "--before",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="with --at-once: to compile and test before anything is timed, for so long at most",
    )
    parser.add_argument("--folder", type=Path, default=HERE.parent / "out", help="for results")
    parser.add_argument("--list", action="store_true", help="only say what would run")
    parser.add_argument("--tiny", action="store_true", help="models of a few layers, to try it out")
    parser.add_argument("--steps", type=int, help="steps of each kind to time")
    arguments = parser.parse_args(words)
    unknown = [name for name in arguments.names if name not in runs]
    if unknown:
        parser.error(f"there is no run {unknown[0]}: they are {', '.join(runs)}")
    arguments.names = arguments.names or list(runs)
    return arguments


def _one_by_one(
    chosen: Sequence[Run], arguments: argparse.Namespace, begun: float, end: float
) -> list[str]:
    """Each has the machine to itself; the names of those that did not end well."""
    _untimed(chosen, arguments, end)
    return [run.name for run in chosen if not _ran(run, arguments, begun, end)]


def _side_by_side(
    chosen: Sequence[Run], arguments: argparse.Namespace, begun: float, end: float
) -> list[str]:
    """Several at once that take turns, but those first whose whole time is the question."""
    cold = [run for run in chosen if run.name in COLD]
    rest = [run for run in chosen if run not in cold]
    failed = [run.name for run in cold if not _ran(run, arguments, begun, end)]
    with (
        turns.kept_awake(_turns(arguments)),
        ThreadPoolExecutor(1) as aside,
        ThreadPoolExecutor(arguments.at_once) as lanes,
    ):
        untimed = aside.submit(_untimed, rest, arguments, end)
        wait([untimed], timeout=arguments.before)
        well = list(lanes.map(lambda run: _ran(run, arguments, begun, end), rest))
        untimed.result()
    # What had no room beside others has the device to itself now.
    well = [
        _ran(run, arguments, begun, end) if _had_no_room(run, arguments) else ended
        for run, ended in zip(rest, well, strict=True)
    ]
    return failed + [run.name for run, ended in zip(rest, well, strict=True) if not ended]


def _had_no_room(run: Run, arguments: argparse.Namespace) -> bool:
    log = _log(run.name, arguments)
    return log.exists() and "OutOfMemoryError" in log.read_text()


def _untimed(chosen: Sequence[Run], arguments: argparse.Namespace, end: float) -> None:
    """What needs no quiet, all at once: compile for the peers, and test."""
    commands = {}
    if arguments.tests:
        words = [sys.executable, "-m", "pytest", "-q", str(HERE.parent / "tests/gpu")]
        commands["tests"] = words, "tests"
    if arguments.ahead:
        tiny = ["--tiny"] if arguments.tiny else []
        script = str(HERE / "ahead.py")
        wanted = [
            (workload, peer, run.name)
            for run in chosen
            for workload, peer in run.systems
            if f"{workload} | {peer}" not in _measured(run, arguments)
        ]
        for workload, peer, user in _mixed(wanted):
            name = f"ahead-{user}-{workload}-{peer}".translate(str.maketrans(" :@", "---"))
            commands[name] = [sys.executable, script, workload, peer, *tiny], user
    if not commands:
        return
    with ThreadPoolExecutor(max(arguments.ahead, 1) + arguments.tests) as pool:
        # Side by side nobody waits for it, and it stands still now and then.
        soon = end if arguments.at_once > 1 else min(end, time.monotonic() + LONGEST_AHEAD_S)
        starts = {
            name: pool.submit(_run, words, name, arguments, soon, user)
            for name, (words, user) in commands.items()
        }
        for name, start in starts.items():
            _say(name, start.result())


def _mixed(systems: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """One of each workload in turn, as many of the largest at once have no room on the device.

    Those that take longest go first; unknown ones last.
    """
    places: Counter[str] = Counter()
    placed = []
    for system in systems:
        *_, systems_s = COMPARED.get(system[0], (0,))
        placed.append((systems_s == 0, places[system[0]], -systems_s, system))
        places[system[0]] += 1
    return [system for *_, system in sorted(placed, key=lambda entry: entry[:3])]


def _measured(run: Run, arguments: argparse.Namespace) -> set[str]:
    """The cells that an earlier run of a suite has measured, which are not compiled for again."""
    output = _output(run, arguments)
    if run.words[0] != "memfit" or not output.exists():
        return set()
    return {cell.key for cell in BenchReport.load(output).cells if cell.ok}


def _ran(run: Run, arguments: argparse.Namespace, begun: float, end: float) -> bool:
    """Run one; whether it ended well, with nothing left."""
    left_s = end - time.monotonic() - SPARE_S
    if left_s <= 0:
        return False
    if arguments.tiny and run.words[0] == "memfit":
        _say(run.name, "has no tiny models")
        return True
    output = _output(run, arguments)
    more = ["--time-limit", f"{left_s:.0f}"]
    more += [] if arguments.steps is None else ["--steps", str(arguments.steps)]
    more += ["--tiny"] if arguments.tiny else []
    if run.words[0] == "memfit" and run.name not in COLD and arguments.at_once > 1:
        more += ["--at-once", str(CELLS_AT_ONCE)]
    _say(run.name, f"begun after {(time.monotonic() - begun) / 60:.1f} min")
    result = _run(run.command(output, more), run.name, arguments, end)
    _say(run.name, result)
    text = _log(run.name, arguments).read_text()
    whole = "left:" not in text
    return result.startswith("ended well") and whole


def _run(
    words: list[str],
    name: str,
    arguments: argparse.Namespace,
    end: float,
    user: str | None = None,
) -> str:
    """Start a process, wait for it, and say how it went; its compiled code is for that `user`."""
    begun = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(HERE.parent / "src"), "PYTHONUNBUFFERED": "1"}
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_cache(user or name, arguments)))
    if arguments.at_once > 1 and name not in COLD:
        environment[turns.VARIABLE] = str(_turns(arguments))
    with _log(name, arguments).open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment)
        leave = turns.join_turns(process.pid, environment)
        try:
            code = process.wait(timeout=max(end - begun, 1.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "cut off: the time is over"
        finally:
            leave()
    how = "ended well" if code == 0 else f"failed with {code}"
    return f"{how} after {time.monotonic() - begun:.0f} s"


def _output(run: Run, arguments: argparse.Namespace) -> Path:
    """Where a run's report lies."""
    folder: Path = arguments.folder
    tiny = "tiny-" if arguments.tiny else ""
    return folder / f"{tiny}{GOES_ON.get(run.name, run.name)}-{_machine()}.json"


def _cache(name: str, arguments: argparse.Namespace) -> Path:
    """Where compiled code is kept: side by side apart, as one that stands still may hold a lock."""
    folder: Path = arguments.folder
    own = folder / f".inductor-{name}"  # of an earlier run, or to be made
    apart = name in COLD or arguments.at_once > 1 or own.exists()
    return (own if apart else folder / ".inductor").resolve()


def _turns(arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.folder / ".turns"
    folder.mkdir(exist_ok=True)
    return folder.resolve()


def _log(name: str, arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.folder
    return folder / f"{name}.log"


def _machine() -> str:
    """The machine in a file's name: h200."""
    facts = machine_facts(None)
    return facts["name"].split()[-1].lower() if facts["device"] == "cuda" else "cpu"


def _after(option: str, words: Sequence[str]) -> Iterator[str]:
    """The values of an option."""
    inside = False
    for word in words:
        if word.startswith("--"):
            inside = word == option
        elif inside:
            yield word


def _say(name: str, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {name}: {text}", flush=True)


if __name__ == "__main__":
    main()
