"""The commands run in this process, on an encoder small enough to take no time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from memfit.cli.app import app
from memfit.ir.plan import SCHEMA_VERSION

Run = Callable[..., Any]
SMALL = "n_layer=2 n_embd=64 n_head=2 n_ff=128 vocab_size=200"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny operators are slower on several threads, and their times jump."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def no_terminal() -> None:
    """Tables are as wide as in a file, whoever runs the tests."""
    os.environ.pop("COLUMNS", None)


@pytest.fixture(scope="session")
def tiny() -> list[str]:
    """A target and its options."""
    sizes = [word for field in SMALL.split() for word in ("--set", field)]
    return ["encoder", *sizes, "--batch", "4", "--seq", "32", "--device", "cpu"]


@pytest.fixture(scope="session")
def memfit() -> Run:
    """Run the command line; the result has stdout, stderr and exit_code."""

    def run(*words: str) -> Any:
        result = CliRunner().invoke(app, [str(w) for w in words], prog_name="memfit")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception  # a traceback is never right
        return result

    return run


@pytest.fixture(scope="session")
def plan_file(memfit: Run, tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved plan for the tiny encoder."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    result = memfit("plan", *tiny, "--budget", "90%", "-o", path)
    assert result.exit_code == 0, result.stderr
    assert json.loads(path.read_text())["schema_version"] == SCHEMA_VERSION
    return path


@pytest.fixture
def workload_file(tmp_path: Path) -> Callable[..., str]:
    """Write a workload file from its lines; return it as a target."""

    def write(
        *lines: str,
        model: str = "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))",
        loss: str = "model(batch).mean()",
        batch: str = "torch.ones(2, 4)",
    ) -> str:
        path = tmp_path / "mine.py"
        body = [
            "import torch",
            "import memfit",
            "def loss_fn(model, batch):",
            f"    return {loss}",
            "def workload():",
            *(f"    {line}" for line in lines),
            f"    model = {model}",
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
            f"    return memfit.Workload(model, loss_fn, optimizer, {batch})",
        ]
        path.write_text("\n".join(body) + "\n")
        return f"{path}:workload"

    return write
