"""All benchmarks in one command: what it starts, in which order, and how it ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run
import torch

from memfit.ir.bench import FAILED, OK, BenchReport, Cell

TABLE = """
| name | question | command | minutes | results |
|---|---|---|---|---|
| `first` | ? | `benchmarks/inside.py --only resnet50@64 'gpt2@8x1024 bf16' \
--peers eager compile blocks` | 1 | |
| `second` | How? | `benchmarks/observe.py` | 2* | no |
| `setup` | When? | `memfit bench transformers:gpt2 --systems compile` | 3 | no |
"""

Main = Callable[..., list[list[str]]]


class Process:
    """A process that has ended already."""

    pid = 0

    def __init__(self, code: int) -> None:
        self.wait = lambda timeout: code


class Subprocess:
    """The module, with another `Popen`."""

    TimeoutExpired, STDOUT = subprocess.TimeoutExpired, subprocess.STDOUT

    def __init__(self, start: Callable[..., Any]) -> None:
        self.Popen = start


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Main:
    """Runs main with these words; returns the commands that it starts, none of which does much."""
    (tmp_path / "README.md").write_text(TABLE)
    monkeypatch.setattr(run, "HERE", tmp_path)

    def main(*words: str, code: int = 0, says: str = "") -> list[list[str]]:
        commands: list[list[str]] = []

        def start(command: list[str], *, stdout: Any, env: Any, **_: Any) -> Any:
            stdout.write(says)
            cache = Path(env["TORCHINDUCTOR_CACHE_DIR"]).name
            commands.append([*(Path(word).name for word in command[1:]), cache])
            return Process(code)

        monkeypatch.setattr(run, "subprocess", Subprocess(start))
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        folder = ["--folder", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["run.py", *words, *folder])
        run.main()
        return commands

    return main


def test_runs_go_in_the_order_of_the_table(started: Main) -> None:
    first, second, setup = started("--minutes", "10")
    assert first[:4] == ["inside.py", "--only", "resnet50@64", "gpt2@8x1024 bf16"]
    assert second[:3] == ["observe.py", "-o", "second-cpu.json"]
    assert second[3] == "--time-limit" and 500 < float(second[4]) < 600
    assert setup[:4] == ["-m", "memfit", "bench", "transformers:gpt2"] and "--no-charts" in setup
    assert (first[-1], setup[-1]) == (".inductor", ".inductor-setup")  # it compiles anew


def test_some_can_be_chosen_and_tried_out(started: Main) -> None:
    assert [c[0] for c in started("second", "first")] == ["observe.py", "inside.py"]
    (tiny,) = started("setup", "second", "--tiny", "--steps", "2")
    assert {"--tiny", "tiny-second-cpu.json", "--steps"} <= set(tiny)


def test_what_needs_no_quiet_goes_first(started: Main) -> None:
    *before, measured = started("first", "--ahead", "2", "--tests")
    assert measured[0] == "inside.py"
    assert sorted(command[:3] for command in before) == sorted(
        [
            ["-m", "pytest", "-q"],
            *(
                ["ahead.py", workload, peer]
                for workload in ("resnet50@64", "gpt2@8x1024 bf16")
                for peer in ("compile", "blocks")
            ),
        ]
    )


def test_a_suite_is_compiled_ahead_too_of_each_workload_one_the_longest_first() -> None:
    runs = run.read_runs("| `all` | ? | `memfit bench --suite peers` | 1 | |")
    systems = runs["all"].systems
    assert ("resnet152@64", "compile:0.2") in systems and ("vit_b_16@64", "blocks") in systems
    assert not {"eager", "checkpoint", "save-on-cpu"} & {peer for _, peer in systems}
    ordered = run._mixed([(*pair, "all") for pair in systems])
    assert {peer for _, peer, _ in ordered[:5]} == {"compile"}
    assert [name for name, *_ in ordered][5:10] == [
        "gpt2-large@8x1024 bf16",
        "resnet152@64",
        "vit_b_16@64",
        "resnet50@64",
        "encoder@256x128",
    ]
    some = "| `all` | ? | `memfit bench --suite peers --workloads 'gpt2*,vit*'` | 1 | |"
    names = {name for name, _ in run.read_runs(some)["all"].systems}
    assert names == {"gpt2-large@8x1024 bf16", "vit_b_16@64"}
    for named, peers in (("eager", set()), ("eager,compile", {"compile"})):
        one = f"| `one` | ? | `memfit bench --suite sweep --systems {named}` | 1 | |"
        assert {peer for _, peer in run.read_runs(one)["one"].systems} == peers


def test_what_a_suite_has_measured_is_not_compiled_for_again(started: Main, tmp_path: Path) -> None:
    suite = "memfit bench --suite sweep --workloads 'encoder@2x*,encoder@4x*'"
    (tmp_path / "README.md").write_text(f"| `some` | ? | `{suite}` | 1 | |")
    cells = [Cell("encoder@2x128", "compile", OK), Cell("encoder@4x128", "compile", FAILED)]
    report = BenchReport({"device": "cpu"}, {}, cells=tuple(cells))
    (tmp_path / "out").mkdir()
    report.save(tmp_path / "out/some-cpu.json")
    *ahead, _ = started("some", "--ahead", "2")
    assert [command[:3] for command in ahead] == [["ahead.py", "encoder@4x128", "compile"]]


def test_side_by_side_a_suite_runs_some_cells_at_once(started: Main, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("| `all` | ? | `memfit bench --suite savings` | 1 | |")
    (alone,) = started("all")
    (beside,) = started("all", "--at-once", "3")
    assert "--at-once" not in alone and beside[beside.index("--at-once") + 1] == "2"


def test_side_by_side_each_has_a_cache_and_what_compiles_alone_goes_first(started: Main) -> None:
    setup, *others = started("--at-once", "2", "--ahead", "1")
    assert setup[-1] == ".inductor-setup"
    caches = {command[0]: command[-1] for command in others}
    assert caches == {
        "inside.py": ".inductor-first",
        "ahead.py": ".inductor-first",
        "observe.py": ".inductor-second",
    }


def test_what_was_compiled_side_by_side_is_found_again_one_by_one(
    started: Main, tmp_path: Path
) -> None:
    (alone,) = started("first")
    assert alone[-1] == ".inductor"
    (tmp_path / "out/.inductor-first").mkdir(parents=True)
    (again,) = started("first")
    assert again[-1] == ".inductor-first"


def test_what_had_no_room_beside_others_runs_once_more_by_itself(started: Main) -> None:
    once = started("first", "second", "--at-once", "2")
    twice = started("first", "second", "--at-once", "2", says="OutOfMemoryError: of the device")
    assert sorted(command[0] for command in once) == ["inside.py", "observe.py"]
    assert [command[0] for command in twice][2:] == ["inside.py", "observe.py"]


def test_side_by_side_compiling_may_have_a_start(started: Main) -> None:
    commands = started("first", "--at-once", "2", "--ahead", "1", "--before", "60")
    assert [command[0] for command in commands] == [*["ahead.py"] * 4, "inside.py"]


def test_a_failure_and_what_is_left_are_said(started: Main) -> None:
    with pytest.raises(SystemExit, match="not whole: second "):
        started("second", code=1)
    with pytest.raises(SystemExit, match="not whole: second "):
        started("second", says="left:    20 s  a row")
    with pytest.raises(SystemExit, match="not whole: first, second, setup "):
        started("--minutes", "0.1")


def test_it_can_only_say_what_it_would_run(
    started: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not started("--list")
    assert capsys.readouterr().out.splitlines()[1].split() == ["second", "benchmarks/observe.py"]
    with pytest.raises(SystemExit):
        started("third")
    assert "there is no run third: they are first, second, setup" in capsys.readouterr().err


def test_compiling_ahead(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import ahead

    monkeypatch.setattr(sys, "argv", ["ahead.py", "encoder@256x128", "eager", "--tiny"])
    ahead.main()
    assert "encoder@256x128, eager: compiled in" in capsys.readouterr().err


def test_compiling_ahead_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    import ahead

    monkeypatch.setattr(ahead, "PATIENCE_S", 0.0)
    room = iter([torch.OutOfMemoryError(), torch.OutOfMemoryError(), None])

    def step() -> None:
        if error := next(room):
            raise error

    ahead._patiently(step)
    assert not list(room)
    monkeypatch.setattr(ahead, "TRIES", 0)
    room = iter([torch.OutOfMemoryError()])
    with pytest.raises(torch.OutOfMemoryError):
        ahead._patiently(step)
