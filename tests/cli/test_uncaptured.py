"""The commands on models that torch cannot trace, and with plans that no longer match."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

WORKLOAD = """
import torch
from torch import nn
import memfit

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.ACTIVATION(self.up(x)))

class Odd(Block):
    def forward(self, x):
        if x.sum().item() > 1e9:
            return x
        return super().forward(x)

def workload():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Block(), KIND(), Block(), Block(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda model, batch: model(batch).square().mean()
    return memfit.Workload(model, loss, optimizer, torch.ones(8, 6, 8))
"""


def _write(folder: Path, kind: str = "Block", activation: str = "tanh", more: str = "") -> str:
    path = folder / "mine.py"
    text = WORKLOAD.replace("KIND", kind).replace("ACTIVATION", activation)
    path.write_text(text.replace("    optimizer =", f"{more}    optimizer =", 1))
    return f"{path}:workload"


def test_a_branch_on_data_is_named_and_the_fit_works(memfit: Any, tmp_path: Path) -> None:
    target = _write(tmp_path, kind="Odd")
    result = memfit("fit", target, "--budget", "1GiB", "--strategy", "all", "--steps", "1")
    assert result.exit_code == 0, result.stderr
    text = " ".join(result.stdout.split())
    assert "not captured, run by module: 2: Odd: it branches on the value of a tensor" in text
    assert "(mine.py:" in text


@pytest.mark.parametrize("strategy", ["all", "none"])
def test_a_plan_for_other_operators_is_refused(memfit: Any, tmp_path: Path, strategy: str) -> None:
    """The modules and the shapes of the parameters are the same, the code between them is not."""
    target, plan = _write(tmp_path), tmp_path / "plan.json"
    made = memfit("plan", target, "--strategy", strategy, "--budget", "1GiB", "-o", plan)
    assert made.exit_code == 0, made.stderr
    assert json.loads(plan.read_text())["variants"]
    _write(tmp_path, activation="relu")
    result = memfit("fit", target, "--plan", plan, "--steps", "1")
    assert result.exit_code == 2, result.stdout
    assert result.stdout == ""
    assert "Block no longer runs the operators it was planned for" in result.stderr
    assert (
        "\nhint: the model, its mode, its autocast settings or its inputs changed" in result.stderr
    )


def test_a_compiled_module_is_refused(memfit: Any, tmp_path: Path) -> None:
    target = _write(tmp_path, more="    model[2].compile(backend='eager')\n")
    result = memfit("profile", target)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: 2 was given to torch.compile")
    assert "\nhint: " in result.stderr
