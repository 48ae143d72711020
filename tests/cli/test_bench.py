"""`memfit bench` end to end: a tiny suite, its files, a cut, a failure, a regression."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from memfit.ir.bench import BenchReport

Run = Callable[..., Any]
SIZES = ["n_layer=3", "n_embd=32", "n_head=2", "n_ff=64", "vocab_size=50"]
TARGET = ["encoder", *(w for f in SIZES for w in ("--set", f)), "--seq", "64", "--device", "cpu"]
SYSTEMS = ["--systems", "eager,checkpoint,memfit", "--budgets", "90%,1%"]
CHARTS = find_spec("matplotlib") is not None
QUICK = ["--steps", "3", "--executor", "module", "--no-charts"]


@pytest.fixture(scope="module", autouse=True)
def one_thread_in_cells() -> Iterator[None]:
    """Processes of their own take as many threads as this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def done(memfit: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A sweep of two batch sizes, with charts where they can be drawn."""
    path = tmp_path_factory.mktemp("bench") / "tiny.json"
    words = ["--batch-sizes", "2,4", *SYSTEMS, *(QUICK[:-1] if CHARTS else QUICK), "-o", path]
    return path, memfit("bench", *TARGET, *words)


def test_cells_run_later_stand_in_their_place(memfit: Run, tmp_path: Path) -> None:
    words = [*TARGET, "--batch", "2", "--systems", "eager,checkpoint", *QUICK]
    for pattern in ("* | eager", "* | checkpoint"):
        result = memfit("bench", *words, "--only", pattern, "-o", tmp_path / "b.json")
        assert result.exit_code == 0, result.stderr
    report = BenchReport.load(tmp_path / "b.json")
    assert [cell.system for cell in report.cells] == ["eager", "checkpoint"]


def test_a_tiny_suite_from_end_to_end(done: tuple[Path, Any]) -> None:
    path, result = done
    assert result.exit_code == 0, result.stderr
    report = BenchReport.load(path)
    first, second = (w.name for w in report.workloads)
    assert (first, second) == tuple(f"encoder@{n}x64 {' '.join(SIZES)}" for n in (2, 4))
    found = {c.system: c.status for c in report.cells_of(first)}
    assert found == {
        "eager": "ok",
        "checkpoint": "ok",
        "memfit:90% executor=module": "ok",
        "memfit:1% executor=module": "refused",
    }
    assert "memfit is faster at " in result.stdout
    assert "2 workloads: memfit is faster at " in result.stdout
    assert "REFUSED" in result.stdout and "over the batch size" in result.stdout
    assert "memfit ran by the executor module" in result.stdout
    assert "[8/8]" in result.stderr  # a line for each cell, as this is no terminal


def test_its_files_can_be_read_by_themselves(done: tuple[Path, Any]) -> None:
    path, _ = done
    text = path.with_suffix(".md").read_text()
    assert "| system | peak MB |" in text and "| batch | base MB |" in text
    assert "What the peak is made of" in text and "Plans, estimated and measured" in text
    html = path.with_suffix(".html").read_text()
    assert (
        html.startswith("<!DOCTYPE html>")
        and "<svg" in html
        and "http://" not in (html.replace("http://www.w3.org", ""))
    )
    charts = sorted(p.name for p in path.with_suffix(".charts").iterdir())
    assert any(name.endswith("-pareto.svg") for name in charts)
    assert any("over_the_batch_size-peak" in name for name in charts)


def test_a_second_run_has_nothing_to_do(memfit: Run, done: tuple[Path, Any]) -> None:
    path, _ = done
    words = ["--batch-sizes", "2,4", *SYSTEMS, *QUICK, "-o", path]
    before = BenchReport.load(path)
    again = memfit("bench", *TARGET, *words, "--json")
    assert again.exit_code == 0, again.stderr
    data = json.loads(again.stdout)
    assert data["schema_version"] == 1 and len(data["cells"]) == 8
    assert set(data["verdicts"]) == {w["name"] for w in data["workloads"]}
    assert BenchReport.load(path).cells == before.cells
    assert "/8]" not in again.stderr


def test_files_are_written_anew_from_the_json_of_any_machine(
    memfit: Run, done: tuple[Path, Any], tmp_path: Path
) -> None:
    data = json.loads(done[0].read_text())
    data["machine"] |= {"name": "a GPU elsewhere", "device": "cuda"}
    path = tmp_path / "elsewhere.json"
    path.write_text(json.dumps(data))
    result = memfit("bench", "--render", path, *([] if CHARTS else ["--no-charts"]))
    assert result.exit_code == 0, result.stderr
    for form in (".md", ".html"):
        assert "a GPU elsewhere" in path.with_suffix(form).read_text()
    assert path.read_text() == json.dumps(data), "what was measured stays as it was stored"
    assert path.with_suffix(".charts").is_dir() == CHARTS
    missing = memfit("bench", "--render", tmp_path / "nothing.json")
    assert missing.exit_code == 2 and "nothing.json" in missing.stderr


def test_a_cell_that_was_lost_is_run_again_alone(
    memfit: Run, done: tuple[Path, Any], tmp_path: Path
) -> None:
    path, _ = done
    data = json.loads(path.read_text())
    lost = data["cells"].pop(1)
    cut = tmp_path / "cut.json"
    cut.write_text(json.dumps(data))
    words = ["--batch-sizes", "2,4", *SYSTEMS, *QUICK, "-o", cut]
    result = memfit("bench", *TARGET, *words)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("/8]") == 1 and "| checkpoint: ok" in result.stderr
    now = BenchReport.load(cut)
    assert [c.system for c in now.cells][1] == lost["system"] == "checkpoint"


def test_a_time_limit_leaves_cells_to_the_next_run(memfit: Run, tmp_path: Path) -> None:
    path = tmp_path / "short.json"
    words = [*TARGET, "--batch", "2", "--systems", "eager,checkpoint", *QUICK, "-o", path]
    short = memfit("bench", *words, "--time-limit", "5")
    assert short.exit_code == 0, short.stderr
    assert "2 cells are left for want of time" in short.stdout and "need 60 s" in short.stdout
    assert BenchReport.load(path).cells == ()
    data = json.loads(memfit("bench", *words, "--time-limit", "5", "--json").stdout)
    assert [name.rpartition(" | ")[2] for name in data["left"]] == ["eager", "checkpoint"]
    whole = memfit("bench", *words)
    assert whole.exit_code == 0 and "are left" not in whole.stdout
    assert all(c.ok and c.forked for c in BenchReport.load(path).cells)


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(
    memfit: Run, tmp_path: Path
) -> None:
    path = tmp_path / "cut.json"
    (tmp_path / "slow.py").write_text(
        "import time, torch, memfit\n"
        "def loss_fn(model, batch):\n"
        "    time.sleep(model.seconds)\n"
        "    return model(batch).mean()\n"
        "def workload(seconds=0.0):\n"
        "    model = torch.nn.Linear(4, 1)\n"
        "    model.seconds = seconds\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    return memfit.Workload(model, loss_fn, optimizer, torch.ones(2, 4))\n"
        "def forever():\n"
        "    return workload(600.0 if not open(__file__ + '.go', 'a').tell() else 0.0)\n"
    )
    targets = [f"{tmp_path / 'slow.py'}:{name}" for name in ("workload", "forever")]
    words = [
        "bench",
        *targets,
        "--systems",
        "eager",
        "--steps",
        "2",
        "--no-charts",
        "-o",
        str(path),
    ]
    source = str(Path(__file__).resolve().parents[2] / "src")
    process = subprocess.Popen(
        [sys.executable, "-m", "memfit", *words],
        env=os.environ | {"PYTHONPATH": source},
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    begun = time.monotonic()
    while not path.exists() or not BenchReport.load(path).cells:  # the second would never end
        assert process.poll() is None and time.monotonic() - begun < 120
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in said
    assert [c.workload for c in BenchReport.load(path).cells] == ["slow.py:workload"]
    (tmp_path / "slow.py.go").write_text("on")
    result = memfit(*words)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("/2]") == 1 and "[2/2] slow.py:forever | eager: ok" in result.stderr


def test_against_an_earlier_run(memfit: Run, done: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = done
    words = ["--batch-sizes", "2,4", *SYSTEMS, *QUICK, "-o", path]
    same = memfit("bench", *TARGET, *words, "--against", path)
    assert same.exit_code == 0 and "8 cells compared, 8 as they were" in same.stdout
    data = json.loads(path.read_text())
    for cell in data["cells"]:
        if cell["system"] == "checkpoint":
            cell["peak_bytes"] = int(cell["peak_bytes"] / 1.5)
    faster = tmp_path / "faster.json"
    faster.write_text(json.dumps(data))
    worse = memfit("bench", *TARGET, *words, "--against", faster)
    assert worse.exit_code == 1
    assert worse.stdout.count("worse: encoder@") == 2 and "peak / reference" in worse.stdout
    data = json.loads(memfit("bench", *TARGET, *words, "--against", faster, "--json").stdout)
    assert [c["verdict"] for c in data["changes"]].count("worse") == 2


def test_a_benchmark_without_the_cells_was_refused_after_all_had_run(
    memfit: Run, done: tuple[Path, Any], tmp_path: Path
) -> None:
    """A hundred seconds of cells, and then exit code 2."""
    path = tmp_path / "other.json"
    words = ["--batch", "3", "--systems", "eager", *QUICK, "-o", path, "--against", done[0]]
    result = memfit("bench", *TARGET, *words)
    assert result.exit_code == 2 and "has none of these cells" in result.stderr
    assert "\nhint: " in result.stderr and "x64" in result.stderr
    assert list(tmp_path.iterdir()) == [], "nothing has run"


def test_a_cell_that_fails_is_a_row_and_the_suite_goes_on(
    memfit: Run, workload_file: Callable[..., str], tmp_path: Path
) -> None:
    target = workload_file(loss="(_ for _ in ()).throw(torch.OutOfMemoryError('no room'))")
    path = tmp_path / "failing.json"
    result = memfit("bench", target, "--systems", "eager,save-on-cpu", *QUICK, "-o", path)
    assert result.exit_code == 0, result.stderr
    cells = BenchReport.load(path).cells
    assert [c.status for c in cells] == ["out of memory", "unavailable"]
    assert "OUT OF MEMORY: the step does not fit" in path.with_suffix(".md").read_text()


def test_list_runs_nothing(memfit: Run, tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    result = memfit("bench", "--list", "--device", "cpu", "-o", path)
    assert result.exit_code == 0 and not path.exists()
    assert "resnet50@64 | eager" in result.stdout
    assert "gpt2-large@8x1024 bf16 | memfit:40%" in result.stdout
    assert "resnet152@64 | memfit:60% launch=graphs" in result.stdout
    other = memfit("bench", "--list", "--device", "cpu", "--budgets", "50%", "-o", path)
    assert "resnet152@64 | memfit:50%\n" in other.stdout and "launch=graphs\n" not in other.stdout
    assert "deepspeed-offload" in result.stdout
    words = ["encoder", "--systems", "memfit:60%,memfit-cut:40%", "--executor", "graph"]
    words += ["--allow", "+offload", "--json"]
    listed = json.loads(memfit("bench", *words, "--list", "--device", "cpu").stdout)["cells"]
    how = "allow=+offload executor=graph"
    assert listed == [f"encoder | {name} {how}" for name in ("memfit:60%", "memfit-cut:40%")]
    words = ["--suite", "sweep", "--largest-in", "8GiB", "--workloads", "encoder*", "--json"]
    listed = json.loads(memfit("bench", *words, "--list", "--device", "cpu").stdout)["cells"]
    # Over batch sizes memfit runs the eager step's own operators unless another way is asked for.
    assert listed.count("encoder@256x128 | memfit:65% executor=module") == 1
    (largest,) = [name for name in listed if "largest" in name]
    assert largest == "encoder@2x128 | largest-batch:8GiB executor=module"
    words = ["encoder", "--batch-sizes", "4", "--executor", "auto", "--json"]
    listed = json.loads(memfit("bench", *words, "--list", "--device", "cpu").stdout)["cells"]
    assert all("executor=auto" in name for name in listed if "memfit" in name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--suite", "every"], "unknown suite 'every'"),
        (["--suite", "peers", "encoder"], "--suite names workloads"),
        (["--suite", "sweep", "--batch-sizes", "4"], "--batch-sizes sets the batch"),
        (["encoder", "--batch", "4", "--batch-sizes", "4"], "--batch-sizes sets the batch"),
        (["--batch", "4"], "--batch are for targets"),
        (["encodr"], "unknown target 'encodr'"),
        (["encoder", "--systems", "eagr"], "unknown system 'eagr'"),
        (["encoder", "--systems", " , "], "--systems names nothing"),
        (["encoder", "--budgets", ","], "--budgets names nothing"),
        (["encoder", "--budgets", "lots"], "not a number of bytes"),
        (["encoder", "--allow", "magic"], "unknown technique 'magic'"),
        (["encoder", "--allow", "+offload,recompute"], "mixes names"),
        (["encoder", "--executor", "gpu"], "unknown executor 'gpu'"),
        (["encoder", "--batch-sizes", "x"], "not a list of batch sizes"),
        (["--workloads", "resnet18*"], "no workload is called 'resnet18*'"),
        (["--only", "nothing"], "nothing to run"),
        (["encoder", "--largest-in", "60%"], "means nothing while the batch size is open"),
        (["encoder", "--device", "cpu", "--cap", "1GiB"], "--cap limits the allocator of a GPU"),
        (["encoder", "--against", "nowhere.json"], "cannot read the benchmark"),
        (["encoder", "-o", "no/such/folder/b.json"], "there is no folder"),
        (["encoder", "-o", "bench.md"], "-o bench.md names the JSON file"),
        (["encoder", "-o", "."], "is a folder"),
    ],
)
def test_wrong_words_are_refused_before_anything_runs(
    memfit: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = memfit("bench", *words)
    assert result.exit_code == 2
    assert message in result.stderr and "\nhint: " in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_known_before_the_first_cell(memfit: Run) -> None:
    result = memfit("bench", *TARGET, "--systems", "eager", *QUICK, "-o", "/proc/bench.json")
    assert result.exit_code == 2 and "cannot be written" in result.stderr
    assert "[1/1]" not in result.stderr and "\nhint: " in result.stderr


def test_two_workloads_of_one_name_are_refused(memfit: Run, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text("")
    targets = [f"{tmp_path / folder / 'mine.py'}:workload" for folder in ("a", "b")]
    result = memfit("bench", *targets, "--systems", "eager", "-o", tmp_path / "b.json")
    assert result.exit_code == 2
    assert "two workloads are called 'mine.py:workload'" in result.stderr


def test_a_cut_off_file_is_refused_not_overwritten(memfit: Run, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text('{"schema_version": 1, "kind": "memfit be')
    result = memfit("bench", *TARGET, "--systems", "eager", *QUICK, "-o", path)
    assert result.exit_code == 2 and "is not a whole memfit benchmark" in result.stderr
    assert path.read_text().endswith("memfit be")


def test_without_matplotlib_nothing_runs_unless_charts_are_left_out(
    memfit: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = memfit("bench", *TARGET, "--systems", "eager", "-o", tmp_path / "b.json")
    assert result.exit_code == 2 and "--no-charts" in result.stderr


def test_an_interrupted_run_says_how_to_go_on(
    memfit: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "interrupted" alone, and nothing of what is stored."""

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("memfit.bench.suite.run_cells", interrupted)
    monkeypatch.setattr("sys.argv", ["memfit", "bench", "encoder", "--only", "* | eager"])
    words = [*TARGET, "--batch", "2", "--systems", "eager", *QUICK, "-o", tmp_path / "b.json"]
    result = memfit("bench", *words)
    assert result.exit_code == 130
    assert f"what has run is in {tmp_path / 'b.json'}" in result.stderr
    assert "to go on with the rest: memfit bench encoder --only '* | eager'" in result.stderr
    assert result.stderr.endswith("interrupted\n")
