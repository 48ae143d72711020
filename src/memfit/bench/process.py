"""Run one cell in a process of its own, and say how it ended whatever happens to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import memfit
from memfit.bench.cell import COMPILED_CODE, CellSpec
from memfit.bench.fork_server import CannotFork, ForkServer
from memfit.bench.systems.catalogue import FAMILIES, split_name
from memfit.ir.bench import CRASHED, TIMED_OUT, Cell
from memfit.ir.codec import from_data, to_data
from memfit.measure.turns import VARIABLE, join_turns
from memfit.targets.architectures import ARCHITECTURES

RunCell = Callable[[CellSpec, float, Path | None], Cell]
# Takes the files of what is asked, told and said, and a time-out; see ForkServer.run.
Start = Callable[[str, str, str, float], int | None]


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder for what cells share: profiles, torch's cache of compiled code. It begins empty."""
    with tempfile.TemporaryDirectory(prefix="memfit-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def cell_processes(
    cells: Sequence[CellSpec],
    folder: Path,
    say: Callable[[str], None],
    turns: Path | None = None,
) -> Iterator[RunCell]:
    """Run cells, each in a process forked from one that has imported what they need.

    Where that cannot be they are plain processes, and `say` is told why. They share what is in
    `folder`; a cache of compiled code that the user has set is taken instead. They take `turns` at
    being timed with others that do so in that folder.
    """
    environment = {COMPILED_CODE: str(folder / "compiled"), **_environment()}
    if turns is not None:
        environment[VARIABLE] = str(turns)
    server: ForkServer | None = None
    plain = False

    def run(spec: CellSpec, timeout_s: float, log: Path | None) -> Cell:
        nonlocal server, plain
        if server is None and not plain:
            server = _fork_server(modules_for(cells), environment, say)
            plain = server is None
        return run_in_process(spec, timeout_s, log, start=start, profiles=folder)

    def start(asked: str, told: str, said: str, timeout_s: float) -> int | None:
        nonlocal server, plain
        if server is not None:
            try:
                return server.run(asked, told, said, timeout_s)
            except CannotFork as error:
                say(f"{error}: from here on cells import torch by themselves")
                server.close()
                server, plain = None, True
        return start_plain(asked, told, said, timeout_s, environment)

    try:
        yield run
    finally:
        if server is not None:
            server.close()


def run_in_process(
    spec: CellSpec,
    timeout_s: float,
    log: Path | None = None,
    *,
    start: Start | None = None,
    profiles: Path | None = None,
) -> Cell:
    """The cell's own result, or one that tells how its process died. Ctrl-C ends it, too.

    Its output goes to `log`, if that is given; profiles that cells can share lie in `profiles`.
    """
    with tempfile.TemporaryDirectory(prefix="memfit-bench-") as folder:
        asked, told, said = (Path(folder) / name for name in ("spec", "cell", "said"))
        wanted = replace(spec, profiles=None if profiles is None else str(profiles))
        asked.write_text(json.dumps(to_data(wanted)), encoding="utf-8")
        said.touch()
        begun = time.monotonic()
        code = (start or start_plain)(str(asked), str(told), str(said), timeout_s)
        seconds = time.monotonic() - begun
        text = said.read_text(encoding="utf-8", errors="replace")
        if log is not None:
            with log.open("a", encoding="utf-8") as file:
                file.write(f"== {spec.workload.name} | {spec.system}\n{text}\n")
        if code == 0 and told.exists():
            cell = from_data(Cell, json.loads(told.read_text(encoding="utf-8")))
            return replace(cell, seconds=seconds)
        name, system = spec.workload.name, spec.system
        if code is None:
            why = f"still running after {timeout_s:.0f} s ({_last_line(text)})"
            return Cell(name, system, TIMED_OUT, why, seconds)
        return Cell(name, system, CRASHED, f"{_death(code)} ({_last_line(text)})", seconds)


def start_plain(
    asked: str,
    told: str,
    said: str,
    timeout_s: float,
    environment: dict[str, str] | None = None,
) -> int | None:
    """Run a cell in a process that imports everything itself."""
    environment = environment or _environment()
    with open(said, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "memfit.bench.cell", asked, told],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # what it starts, such as compilers, ends with it
        )
        leave = join_turns(process.pid, environment)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return None
        except BaseException:
            _end(process)
            raise
        finally:
            leave()


def modules_for(cells: Sequence[CellSpec]) -> list[str]:
    """What these cells import, as "module" or "module:attribute"."""
    found = ["memfit.bench.cell", "memfit.runtime.compile.backend"]
    for system in dict.fromkeys(cell.system for cell in cells):
        family = FAMILIES[split_name(system)[0]]
        if family.package is None:  # what others do when they are imported is not known
            found.append(f"memfit.bench.systems.{family.module}")
    for target in dict.fromkeys(cell.workload.target for cell in cells):
        zoo, separator, name = target.partition(":")
        if separator and zoo == "transformers" and name in ARCHITECTURES:
            found.append(f"transformers:{ARCHITECTURES[name].model_class}")
        elif separator and zoo in ("torchvision", "timm"):
            found.append(f"{zoo}:models")
    return list(dict.fromkeys(found))


def _fork_server(
    modules: list[str], environment: dict[str, str], say: Callable[[str], None]
) -> ForkServer | None:
    """A server with these modules, or without those that would spoil it."""
    if sys.platform != "linux":
        say("cells import torch by themselves: only on Linux they can be forked safely")
        return None
    while True:
        try:
            return ForkServer(modules, environment)
        except CannotFork as error:
            if error.module is None or error.module == modules[0]:
                say(f"cells import torch by themselves: {error}")
                return None
            say(f"{error}: cells do it by themselves")
            modules = [name for name in modules if name != error.module]


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
