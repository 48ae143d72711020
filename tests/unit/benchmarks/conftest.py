"""The scripts of benchmarks/ import each other by name, from their own folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Scripts turn tf32 on, and leave the number of threads at one."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    threads = torch.get_num_threads()
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    torch.set_num_threads(threads)


@pytest.fixture
def results() -> Path:
    """Where results of real runs are kept."""
    return BENCHMARKS / "results"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Runs a script's main with these words; returns the file it writes to."""

    def run(name: str, *words: str) -> Path:
        path = tmp_path / f"{name}.json"
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words, "-o", str(path)])
        __import__(name).main()
        return path

    return run


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., argparse.Namespace]:
    """The common options, as a script's parser gives them."""

    def parse(*words: str) -> argparse.Namespace:
        from common import parser_of

        file = str(tmp_path / "report.json")
        return parser_of("", "report.json", ["one", "two"]).parse_args([*words, "-o", file])

    return parse
