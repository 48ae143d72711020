"""Processes of cells, forked and plain: what they share, what they do not, how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memfit.bench.cell import CellSpec
from memfit.bench.compile_ahead import compile_ahead
from memfit.bench.fork_server import CannotFork, ForkServer
from memfit.bench.process import (
    RunCell,
    _environment,
    _fork_server,
    cell_processes,
    modules_for,
    run_in_process,
    shared_folder,
)
from memfit.bench.workloads import named
from memfit.ir.bench import CRASHED, OK, TIMED_OUT, Cell, WorkloadSpec

MakeTarget = Callable[..., WorkloadSpec]
FIELDS = ("n_layer=3", "n_embd=32", "n_head=2", "n_ff=64", "vocab_size=50")
TINY = named(WorkloadSpec("", "encoder", 4, 16, device="cpu", fields=FIELDS))
SOURCE = str(Path(__file__).resolve().parents[3] / "src")
SLEEPER = "p = __import__('subprocess').Popen(['sleep', '600'])"
forks = pytest.mark.skipif(sys.platform != "linux", reason="cells are forked on Linux alone")


def has_ended(pid: str) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def wait_until(holds: Callable[[], bool], limit_s: float = 60) -> None:
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < limit_s, "it never happened"
        time.sleep(0.05)


def fail(text: str) -> None:
    raise AssertionError(text)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Processes of their own take as many threads as this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def forked(one_thread: None) -> Iterator[RunCell]:
    """Runs cells from one fork server."""
    cells = [CellSpec(TINY, "eager", 1), CellSpec(TINY, "memfit:80%", 1)]
    with shared_folder() as folder, cell_processes(cells, folder, fail) as run:
        yield run


@pytest.fixture(params=["plain", pytest.param("forked", marks=forks)])
def run_cell(request: pytest.FixtureRequest) -> RunCell:
    """Runs a cell in a process of either kind."""
    return run_in_process if request.param == "plain" else request.getfixturevalue("forked")


def run(run_cell: RunCell, spec: WorkloadSpec, system: str = "eager", limit_s: float = 120) -> Cell:
    return run_cell(CellSpec(spec, system, steps=1), limit_s, None)


def test_each_cell_has_a_process_and_a_session_of_its_own(
    run_cell: RunCell, file_target: MakeTarget, tmp_path: Path
) -> None:
    log = tmp_path / "cells.log"
    spec = file_target("print('here is', os.getpid(), os.getsid(0), torch.cuda.is_initialized())")
    for _ in range(2):
        cell = run_cell(CellSpec(spec, "eager", steps=1), 120, log)
        assert cell.status == OK, cell.reason
        assert cell.forked == (run_cell is not run_in_process) and cell.seconds > 0
    said = {line for line in log.read_text().splitlines() if line.startswith("here is")}
    assert len(said) == 2
    for line in said:
        process, session, cuda = line.split()[2:]
        assert process == session != str(os.getpid()) and cuda == "False"


def test_a_process_that_is_killed_is_a_row(run_cell: RunCell, file_target: MakeTarget) -> None:
    cell = run(run_cell, file_target("os.kill(os.getpid(), signal.SIGKILL)"))
    assert cell.status == CRASHED and "signal SIGKILL" in cell.reason
    assert "measuring the eager step" in cell.reason and cell.seconds > 0


def test_an_exit_code_is_told(run_cell: RunCell, file_target: MakeTarget) -> None:
    cell = run(run_cell, file_target("raise SystemExit(7)"))
    assert cell.status == CRASHED and "exit code 7" in cell.reason


def test_a_cell_that_takes_too_long_is_ended_with_all_it_started(
    run_cell: RunCell, file_target: MakeTarget, tmp_path: Path
) -> None:
    left = tmp_path / "pid"
    does = f"{SLEEPER}; open({str(left)!r}, 'w').write(str(p.pid)); time.sleep(600)"
    limit_s = 12 if run_cell is run_in_process else 3
    cell = run(run_cell, file_target(does), limit_s=limit_s)
    assert cell.status == TIMED_OUT and f"still running after {limit_s} s" in cell.reason
    wait_until(lambda: has_ended(left.read_text()))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_cell_ends_with_the_benchmark_that_started_it(
    file_target: MakeTarget, tmp_path: Path, end: signal.Signals
) -> None:
    """With all that it started, whether the benchmark is killed or interrupted."""
    left = tmp_path / "pids"
    does = (
        f"{SLEEPER}; open({str(left)!r}, 'w').write(f'{{p.pid}} {{os.getpid()}}\\n'); "
        "time.sleep(600)"
    )
    target = file_target(does).target
    program = (
        "from memfit.bench.cell import CellSpec\n"
        "from memfit.bench.process import cell_processes, shared_folder\n"
        "from memfit.ir.bench import WorkloadSpec\n"
        f"spec = CellSpec(WorkloadSpec('w', {target!r}), 'eager', 1)\n"
        "with shared_folder() as folder, cell_processes([spec], folder, print) as run:\n"
        "    run(spec, 600, None)\n"
    )
    benchmark = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": SOURCE},
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_until(lambda: left.exists() and left.read_text().endswith("\n"))
    benchmark.send_signal(end)
    benchmark.wait(60)
    for process in left.read_text().split():
        wait_until(lambda process=process: has_ended(process))


@forks
def test_a_step_is_profiled_once_for_all_budgets(forked: RunCell) -> None:
    workload = named(WorkloadSpec("", "encoder", 4, 32, device="cpu", fields=FIELDS))
    first, second = (
        run(forked, workload, f"memfit:{share} executor=module") for share in ("90%", "85%")
    )
    assert first.status == second.status == OK, (first.reason, second.reason)
    assert first.planned.profile_of is None and "recording memory" in first.stages
    assert second.planned.profile_of == "memfit:90% executor=module"
    assert "recording memory" not in second.stages
    assert second.planned.unplanned_peak_bytes == first.planned.unplanned_peak_bytes
    assert second.planned.budget_bytes < first.planned.budget_bytes
    assert second.planned.measured_peak_bytes <= second.planned.budget_bytes
    assert second.planned.numbers_agree


@forks
def test_another_model_of_the_same_name_is_profiled_again(
    forked: RunCell, file_target: MakeTarget, tmp_path: Path
) -> None:
    """A function of the user's may build what it likes."""
    width = tmp_path / "width"
    block = f"torch.nn.Linear(4, int(open({str(width)!r}).read()))"
    spec = file_target("pass", f"torch.nn.Sequential({block}, torch.nn.Tanh())")
    for size, profiled in (("64", True), ("64", False), ("65", True)):
        width.write_text(size)
        cell = run(forked, spec, "memfit:none executor=module")
        assert cell.status == OK, cell.reason
        assert ("recording memory" in cell.stages) == profiled


@forks
@pytest.mark.slow
def test_compiled_code_is_shared_and_says_so(file_target: MakeTarget) -> None:
    model = "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())"
    spec = CellSpec(file_target("pass", model), "compile", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        with shared_folder() as folder, cell_processes([spec], folder, fail) as run:
            cold, cached = (run(spec, 300, None) for _ in range(2))
    assert cold.compiled.label == "cold" and cold.compiled.graphs == 2
    assert cached.compiled.label == "cached: 2 of 2 graphs were on disk"
    assert cached.first_steps_s < cold.first_steps_s


@forks
@pytest.mark.slow
def test_what_was_compiled_ahead_is_found_by_the_cell(
    file_target: MakeTarget, tmp_path: Path
) -> None:
    model = "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())"
    target = file_target("pass", model)
    cells = [CellSpec(target, s, 1) for s in ("eager", "compile", "compile:0.5", "blocks")]
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        compile_ahead(cells, tmp_path, 2, 300, said.append)
        with cell_processes(cells, tmp_path, fail) as run:
            cell = run(cells[2], 300, None)
    assert said[0] == "compiling for 3 cells, 2 at once" and said[1].startswith("compiled in ")
    assert cell.status == OK, cell.reason
    assert cell.compiled.label == "cached: 2 of 2 graphs were on disk"


def test_without_time_or_systems_that_compile_nothing_is_compiled_ahead(tmp_path: Path) -> None:
    said: list[str] = []
    compile_ahead([CellSpec(TINY, "eager", 1)], tmp_path, 2, 300, said.append)
    assert said == []
    compile_ahead([CellSpec(TINY, "compile", 1)], tmp_path, 2, 0, said.append)
    assert said == ["compiling for 1 cells, 2 at once", "compiled in 0 s"]


@forks
@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True)"
         ".start()", "starts a thread"),
        ("import torch\ntorch.cuda.is_initialized = lambda: True", "initialises CUDA"),
    ],
)  # fmt: skip
def test_a_module_that_no_fork_survives_is_left_to_the_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, why: str
) -> None:
    (tmp_path / "spoiling.py").write_text(lines + "\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(CannotFork, match=why) as error:
        ForkServer(["torch", "spoiling"], _environment())
    assert error.value.module == "spoiling"
    said: list[str] = []
    server = _fork_server(["torch", "no_such_module", "spoiling"], _environment(), said.append)
    assert server is not None
    server.close()
    assert said == [f"importing spoiling {why}: cells do it by themselves"]
    assert _fork_server(["spoiling"], _environment(), said.append) is None
    assert said[-1] == f"cells import torch by themselves: importing spoiling {why}"


@forks
def test_when_the_server_dies_cells_go_on_by_themselves(
    file_target: MakeTarget, tmp_path: Path
) -> None:
    once = tmp_path / "once"
    kill = f"(open({str(once)!r}, 'w').close(), os.kill(os.getppid(), signal.SIGKILL))"
    spec = CellSpec(file_target(f"os.path.exists({str(once)!r}) or {kill}"), "eager", 1)
    said: list[str] = []
    with cell_processes([spec], tmp_path, said.append) as run:
        cell = run(spec, 120, None)
    assert cell.status == OK and not cell.forked
    assert said == [
        "the process that starts the cells died: from here on cells import torch by themselves"
    ]


def test_elsewhere_cells_are_plain_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("memfit.bench.process.sys.platform", "darwin")
    assert _fork_server(["torch"], _environment(), said.append) is None
    assert said == ["cells import torch by themselves: only on Linux they can be forked safely"]


def test_what_cells_import_follows_from_their_names() -> None:
    gpt2 = named(WorkloadSpec("", "transformers:gpt2-large", 8, 1024))
    resnet = named(WorkloadSpec("", "torchvision:resnet50", 8))
    cells = [CellSpec(w, s, 1) for w in (gpt2, resnet) for s in ("compile:0.5", "torchao-offload")]
    found = modules_for(cells)
    assert found[0] == "memfit.bench.cell"
    assert {"transformers:GPT2LMHeadModel", "torchvision:models"} <= set(found)
    assert "memfit.bench.systems.peers.compiled" in found
    assert not any("torchao" in name for name in found)
