"""Building on fake tensors: what a user's code does with a model works as on real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memfit.estimating.estimate import estimate
from memfit.estimating.fakes import What, without_memory
from memfit.targets.starter import write_starter
from memfit.workload import Workload


@pytest.fixture(autouse=True)
def nothing_cached() -> None:
    """Torch keeps weak references only to results it has not made before in this process."""
    FakeTensorMode.cache_clear()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.head.weight = self.embedding.weight


@pytest.fixture
def model() -> Iterator[Tied]:
    with without_memory("a target"):
        yield Tied()


@pytest.mark.parametrize(
    ("move", "dtype"),
    [
        (lambda model: model.to("cpu"), torch.float32),
        (lambda model: model.bfloat16(), torch.bfloat16),
        (lambda model: model.to("cpu", torch.float16).float(), torch.float32),
    ],
    ids=["to", "bfloat16", "and back"],
)
def test_models_are_moved_and_cast(
    model: Tied, move: Callable[[nn.Module], nn.Module], dtype: torch.dtype
) -> None:
    before = list(model.parameters())
    move(model)
    after = list(model.parameters())
    assert all(new is old for new, old in zip(after, before, strict=True)), "optimizers hold them"
    assert all(isinstance(p, FakeTensor) and p.dtype is dtype for p in after)
    assert model.head.weight is model.embedding.weight


def test_the_file_that_init_writes_is_estimated(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    write_starter(path)
    first = estimate(f"{path}:workload", "24GiB", overrides={"width": "40"})
    assert first.fits
    estimate("encoder", batch=1, seq=8, overrides={"n_layer": "1"})
    assert estimate(f"{path}:workload", "24GiB", overrides={"width": "40"}) == first


_SCALED = """
import torch
import memfit

def workload():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    return memfit.Workload(
        model, lambda m, b: m(b).sum(), optimizer, torch.ones(8, 64), scaler=scaler
    )
"""


@pytest.mark.parametrize("way", ["instance", "function", "file", "fake"])
def test_a_grad_scaler_does_not_skip_the_step_that_makes_the_optimizers_state(
    way: str, tmp_path: Path
) -> None:
    path = tmp_path / "scaled.py"
    path.write_text(_SCALED)
    file = f"{path}:workload"
    named: dict[str, Any] = {}
    exec(_SCALED, named)
    function: Callable[[], Workload] = named["workload"]
    what: What
    if way == "fake":
        with FakeTensorMode():
            what = function()
    else:
        ways = {"instance": function, "function": lambda: function, "file": lambda: file}
        what = ways[way]()
    made = estimate(what)
    assert made.state_bytes_per_parameter == pytest.approx(16, rel=0.02)
    assert made.categories["optimizer_state"] > 0
