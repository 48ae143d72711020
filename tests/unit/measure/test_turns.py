"""Processes that are timed in turns: while one is, the others stand still, whatever they do."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from memfit.measure import turns
from memfit.measure.turns import alone, join, kept_awake, wake

# A process with a child, both of which count.
COUNTS = """
import pathlib, subprocess, sys, time
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
if name == "parent":
    subprocess.Popen([sys.executable, "-c", sys.argv[3], str(folder), "child"])
for number in range(3000):
    (folder / name).write_text(str(number))
    time.sleep(0.01)
"""
# Takes a turn and dies in it.
DIES = """
import os, signal
from memfit.measure.turns import alone
with alone():
    os.kill(os.getpid(), signal.SIGKILL)
"""


# Forks a process in its turn, which outlives it; another turn can be had at once.
FORKS = """
import os, pathlib, signal, time
from memfit.measure import turns
with turns.alone():
    child = os.fork()
    if not child:
        time.sleep(600)
with turns._turn(pathlib.Path(os.environ[turns.VARIABLE]), wait=False):
    os.kill(child, signal.SIGKILL)
"""


class Other:
    """A process beside this one; `count` is how far it and its child have come."""

    def __init__(self, folder: Path) -> None:
        words = [sys.executable, "-c", COUNTS, str(folder), "parent", COUNTS]
        self.process = subprocess.Popen(words)
        self.files = [folder / "parent", folder / "child"]
        wait_until(lambda: all(file.exists() for file in self.files))

    def count(self) -> list[str]:
        return [file.read_text() for file in self.files]

    def moves(self) -> bool:
        """Whether both go on, sooner or later: the machine may be busy."""
        before = self.count()
        wait_until(lambda: all(n != b for n, b in zip(self.count(), before, strict=True)))
        return True

    def still(self) -> bool:
        time.sleep(0.1)  # what was being written is there then
        before = self.count()
        time.sleep(0.2)
        return self.count() == before


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of those that take turns, this process among them."""
    (tmp_path / "turns").mkdir()
    monkeypatch.setenv(turns.VARIABLE, str(tmp_path / "turns"))
    return tmp_path / "turns"


@pytest.fixture
def other(folder: Path, tmp_path: Path) -> Iterator[Other]:
    """Another process that takes turns."""
    found = Other(tmp_path)
    leave = join(folder, found.process.pid)
    yield found
    family = [found.process, *psutil.Process(found.process.pid).children(recursive=True)]
    for process in family:
        process.send_signal(signal.SIGKILL)
    found.process.wait()
    leave()
    assert not (folder / str(found.process.pid)).exists()


def test_others_stand_still_and_go_on(other: Other) -> None:
    assert other.moves()
    with alone():
        assert other.still()
        with alone():  # inside of another timing
            assert other.still()
        assert other.still()
    assert other.moves()


def test_they_go_on_after_a_failure(other: Other) -> None:
    with pytest.raises(ValueError), alone():
        raise ValueError
    assert other.moves()


def test_without_a_folder_nobody_waits(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(turns.VARIABLE)
    with alone():
        assert other.moves()


def test_whoever_dies_in_its_turn_is_made_up_for(other: Other, folder: Path) -> None:
    assert subprocess.run([sys.executable, "-c", DIES]).returncode == -signal.SIGKILL
    assert other.still()
    with kept_awake(folder):
        assert other.moves()


def test_a_process_that_was_forked_in_a_turn_does_not_keep_it(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=60)


def test_nobody_is_woken_during_a_turn(other: Other, folder: Path) -> None:
    with alone():
        wake(folder)
        assert other.still()


def test_what_started_this_process_is_not_stopped(folder: Path) -> None:
    parent = psutil.Process().ppid()
    leave = join(folder, parent)
    with alone():
        assert psutil.Process(parent).status() != psutil.STATUS_STOPPED
    leave()


def test_a_process_that_has_ended_is_passed_over(folder: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    join(folder, ended.pid)
    with alone():
        pass
    wake(folder)


def wait_until(true: Callable[[], bool], patience_s: float = 20.0) -> None:
    end = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
