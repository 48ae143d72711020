"""Processes that share a machine take turns at being timed: meanwhile the others stand still.

They are told of each other by a folder that the environment names (MEMFIT_TURNS), in which whoever
starts them leaves the number of each; without one, times are taken at once. A process that stands
still keeps its memory. Limits: what it counts by the wall clock, such as a solver's seconds, goes
on; there are no turns on Windows.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

VARIABLE = "MEMFIT_TURNS"
_WAKE_S = 2.0  # how often it is looked whether someone was left standing
# The device has done what the others left to it when it answers so soon, so many times in a row.
_ANSWER_S, _ANSWERS, _PATIENCE_S = 5e-4, 20, 5.0

_taken = 0  # how many timings this process is inside of


@contextmanager
def alone() -> Iterator[None]:
    """Nothing else that takes turns runs meanwhile."""
    global _taken
    folder = os.environ.get(VARIABLE)
    if not folder or _taken:
        yield
        return
    with _turn(Path(folder)):
        stopped = [process for root in _others(Path(folder)) for process in _stop(root)]
        _taken += 1
        try:
            _wait_for_device()
            yield
        finally:
            _taken -= 1
            _signal(stopped, signal.SIGCONT)


def join(folder: Path, process: int) -> Callable[[], None]:
    """Have a process, and what it starts, take turns; returns what ends that."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / str(process)
    file.touch()
    return lambda: file.unlink(missing_ok=True)


def turns_folder(usual: Path) -> Path:
    """Where this process takes turns with others already, else the `usual` folder."""
    folder = Path(os.environ.get(VARIABLE) or usual)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def join_turns(process: int, environment: Mapping[str, str]) -> Callable[[], None]:
    """As `join`, where a process was started in an environment with turns; else does nothing."""
    folder = environment.get(VARIABLE)
    return join(Path(folder), process) if folder else lambda: None


@contextmanager
def kept_awake(folder: Path) -> Iterator[None]:
    """Meanwhile, whoever dies in its turn is made up for: it woke nobody."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(_WAKE_S):
            wake(folder)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def wake(folder: Path) -> None:
    """Let everyone go on, unless one is being timed."""
    try:
        with _turn(folder, wait=False):
            for root in _roots(folder):
                _signal(_family(root), signal.SIGCONT)
    except BlockingIOError:
        pass


@contextmanager
def _turn(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the folder's lock, which goes with the process that holds it."""
    import fcntl  # not on Windows

    with (folder / "turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # also where a forked process still has the file


def _roots(folder: Path) -> Iterator[psutil.Process]:
    for file in folder.iterdir():
        if file.name.isdigit() and psutil.pid_exists(int(file.name)):
            try:
                yield psutil.Process(int(file.name))
            except psutil.NoSuchProcess:
                continue


def _others(folder: Path) -> Iterator[psutil.Process]:
    """Those that neither are this process nor started it."""
    me = psutil.Process()
    mine = {me.pid, *(process.pid for process in me.parents())}
    return (root for root in _roots(folder) if root.pid not in mine)


def _family(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _stop(root: psutil.Process) -> list[psutil.Process]:
    """Stop a process with all it has started, also while it is being stopped."""
    stopped: list[psutil.Process] = []
    while more := [process for process in _family(root) if process not in stopped]:
        _signal(more, signal.SIGSTOP)
        stopped += more
    return stopped


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _wait_for_device() -> None:
    """Until the device has done what the stopped ones had asked of it."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return
    torch.cuda.synchronize()
    ready, end = 0, time.perf_counter() + _PATIENCE_S
    while ready < _ANSWERS and time.perf_counter() < end:
        start = time.perf_counter()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        ready = ready + 1 if time.perf_counter() - start < _ANSWER_S else 0
