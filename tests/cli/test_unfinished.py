"""Fits that come to no result: their run files, the reports of these, and exit codes."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memfit.ir.run_file import RunFile

NO_ROOM = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has more to say"


@pytest.fixture
def no_room(workload_file: Any) -> str:
    """A target whose step finds no memory after its forward."""
    error = f"torch.OutOfMemoryError({NO_ROOM!r})"
    return workload_file(loss=f"(model(batch), (_ for _ in ()).throw({error}))")


@pytest.fixture
def refused(memfit: Any, tiny: list[str], tmp_path: Path) -> Path:
    """The run file of a budget that no plan holds."""
    path = tmp_path / "run.json"
    result = memfit("fit", *tiny, "--budget", "10%", "-o", path)
    assert result.exit_code == 1 and "no plan fits into" in result.stderr
    page = path.with_suffix(".html")
    assert result.stdout == f"wrote {path}; next: memfit report {path} -o {page}\n"
    return path


def test_a_refused_budget_leaves_a_run_file(refused: Path) -> None:
    """It left none."""
    run = RunFile.load(refused)
    assert run.result is None and run.plan is None and run.refused is not None
    assert run.refused.verdict == "infeasible" and run.refused.exit_code == 1
    least = run.refused.minimum_feasible_bytes
    assert least is not None and run.refused.budget_bytes is not None
    assert run.refused.budget_bytes < least and f"({least} bytes)" in run.refused.error
    assert run.refused.hint and run.refused.hint.startswith("try --budget")
    assert run.refused.name == "encoder" and run.refused.device["type"] == "cpu"
    assert run.profile is not None and run.profile.workload == run.refused.workload
    assert run.command.startswith("memfit")


def test_with_json_the_same_is_printed(memfit: Any, tiny: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    result = memfit("fit", *tiny, "--budget", "10%", "-o", path, "--json")
    assert result.exit_code == 1
    printed, written = json.loads(result.stdout), json.loads(path.read_text())
    assert printed.items() <= written.items() and printed["verdict"] == "infeasible"
    (tmp_path / "printed.json").write_text(result.stdout)
    assert RunFile.load(tmp_path / "printed.json").refused is not None


def test_the_run_file_of_a_refused_budget_is_reported(
    memfit: Any, refused: Path, tmp_path: Path
) -> None:
    page = tmp_path / "run.html"
    result = memfit("report", refused, "--no-curve", "-o", page)
    assert result.exit_code == 1 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == f"wrote {page}"
    assert lines[1].startswith("no plan holds the budget: no plan fits into ")
    text = page.read_text(encoding="utf-8")
    assert "No plan holds the budget:" in text and "the smallest possible is" in text
    assert 'id="memory-after"' in text and "How far it came" not in text
    assert "the budget has room" not in text
    assert "after: the nearest plan, by optimal" in text
    words = ("--budget", "90%", "-o", page)
    excluded = memfit("report", refused, *words)
    assert excluded.exit_code == 2 and "exclude each other" in excluded.stderr


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """As in a process of its own: tests freeze what is there, and a fit then freezes nothing."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_a_step_without_memory_leaves_a_run_file(memfit: Any, no_room: str, tmp_path: Path) -> None:
    """A fit that ran out of memory while it was profiled left nothing."""
    path = tmp_path / "run.json"
    result = memfit("fit", no_room, "--budget", "60%", "-o", path)
    assert result.exit_code == 4
    assert "Tried to allocate 2.00 GiB. It ended while finding segments" in result.stderr
    assert result.stdout.startswith(f"wrote {path}; next: memfit report ")
    run = RunFile.load(path)
    assert run.refused is not None and run.profile is None
    assert (run.refused.verdict, run.refused.exit_code) == ("out of memory", 4)
    memory = run.refused.memory
    assert memory is not None and memory.doing == "finding segments"
    assert memory.place == "forward" and memory.largest
    assert memory.kinds["parameters"] == 4 * (4 * 4 + 4 + 4 * 1 + 1)
    assert run.refused.workload["name"] == "mine.py:workload"


def test_a_step_without_memory_is_reported(memfit: Any, no_room: str, tmp_path: Path) -> None:
    run, page, own = (tmp_path / name for name in ("run.json", "run.html", "own.html"))
    memfit("fit", no_room, "--budget", "60%", "-o", run)
    from_file = memfit("report", run, "-o", page)
    at_once = memfit("report", no_room, "--budget", "60%", "-o", own, "--trace", tmp_path / "t")
    for result, written in ((from_file, page), (at_once, own)):
        assert result.exit_code == 4, result.stderr
        lines = result.stdout.splitlines()
        assert lines[0] == f"wrote {written}" and lines[-1] == f"open {written} in a browser"
        text = written.read_text(encoding="utf-8")
        for words in ("Out of memory:", "How far it came", "finding segments", "was live then"):
            assert words in text
        assert "in forward" in text and "parameters" in text
    assert "nothing else: there is no profile" in at_once.stdout
    assert "nothing else" not in from_file.stdout and not (tmp_path / "t").exists()
    said = json.loads(memfit("report", run, "-o", page, "--json").stdout)
    assert said["written"] == [str(page)] and said["verdict"] == "out of memory"


def test_without_a_page_there_is_nothing_to_draw(memfit: Any, no_room: str, tmp_path: Path) -> None:
    result = memfit("report", no_room, "--budget", "60%", "--trace", tmp_path / "t.json")
    assert result.exit_code == 4 and "no profile to draw from" in result.stderr
    assert "hint: -o report.html shows how far it came" in result.stderr


def test_memory_that_ends_after_the_profile_is_shown_beside_it(
    memfit: Any, tiny: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def out_of_memory(*args: object, **kwargs: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("memfit.api.prove", out_of_memory)
    page = tmp_path / "run.html"
    result = memfit("report", *tiny, "--budget", "90%", "--no-curve", "-o", page)
    assert result.exit_code == 4, result.stderr
    text = page.read_text(encoding="utf-8")
    assert "Out of memory:" in text and "How far it came" in text
    assert "running under the budget (round 1)" in text and 'id="memory-before"' in text


def test_a_model_without_memory_leaves_a_run_file(
    memfit: Any, workload_file: Any, tmp_path: Path
) -> None:
    target = workload_file(f"raise torch.OutOfMemoryError({NO_ROOM!r})")
    path, page = tmp_path / "run.json", tmp_path / "run.html"
    result = memfit("fit", target, "--budget", "1MiB", "-o", path)
    assert result.exit_code == 4
    assert memfit("report", path, "-o", page).exit_code == 4
    assert "Out of memory:" in page.read_text(encoding="utf-8")
