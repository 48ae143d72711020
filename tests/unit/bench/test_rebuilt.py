"""Optimizers made anew for a system's own parameters train as the workload's would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memfit.bench.systems.peers.rebuilt import (
    group_names,
    only_known,
    optimizer_options,
    refuse_other_gpus,
    refuse_scaler,
    step_of,
    with_parameters,
)
from memfit.bench.systems.prepared import Unavailable
from memfit.measure.step import run_step

SRC = Path(__file__).resolve().parents[3] / "src"
# A workload with two groups, stepped plainly and by FSDP2 in a group of one.
PROGRAM = """
import torch
from memfit.bench.systems.peers.fsdp2 import prepare
from memfit.bench.systems.prepared import Setting
from memfit.measure.step import run_step
from memfit.targets import resolve_target

def make():
    sizes = {"n_layer": "2", "n_embd": "32", "n_head": "2", "n_ff": "64", "vocab_size": "50"}
    made = resolve_target("encoder", batch=4, seq=16, overrides={**sizes, "dropout": "0"})
    biases = [p for p in made.model.parameters() if p.dim() == 1]
    others = [p for p in made.model.parameters() if p.dim() > 1]
    groups = [{"params": biases, "weight_decay": 0.0, "lr": 0.01}, {"params": others}]
    made.optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5, fused=True)
    return made

plain, sharded = make(), make()
prepared = prepare(Setting(sharded, 1, print), "fsdp2-offload", "")
for _ in range(3):
    run_step(plain)
    prepared.step()
now = dict(sharded.model.named_parameters())
for name, parameter in plain.model.named_parameters():
    torch.testing.assert_close(now[name].full_tensor(), parameter, rtol=1e-4, atol=1e-5)
print("as plain")
"""


def two_groups(zoo):
    made = zoo.workload(zoo.Stack)
    biases = [p for p in made.model.parameters() if p.dim() == 1]
    others = [p for p in made.model.parameters() if p.dim() > 1]
    groups = [{"params": biases, "weight_decay": 0.0, "lr": 0.01}, {"params": others}]
    made.optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5, amsgrad=True)
    return made


def test_groups_and_options_are_those_of_the_workload(zoo):
    made, other = two_groups(zoo), two_groups(zoo)
    options = optimizer_options(made.optimizer)
    assert options["weight_decay"] == 0.5 and "decoupled_weight_decay" not in options
    groups = only_known(with_parameters(group_names(made), other.model), options)
    optimizer = torch.optim.AdamW(groups, **options)
    for mine, theirs in zip(optimizer.param_groups, made.optimizer.param_groups, strict=True):
        assert len(mine["params"]) == len(theirs["params"])
        assert {k: v for k, v in mine.items() if k != "params"} == {
            k: v for k, v in theirs.items() if k != "params"
        }
    torch.manual_seed(1)
    run_step(made)
    torch.manual_seed(1)
    step_of(other, other.model, optimizer)()
    for mine, theirs in zip(other.model.parameters(), made.model.parameters(), strict=True):
        assert torch.equal(mine, theirs) and mine.grad is None


def test_parameters_that_are_not_the_models_are_refused(zoo):
    made = zoo.workload(zoo.Stack)
    made.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(Unavailable, match="not the model's"):
        group_names(made)


def test_scalers_and_other_gpus_are_refused(zoo):
    made = zoo.workload(zoo.Stack)
    refuse_scaler(made, "fsdp2-offload")
    made.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(Unavailable, match="GradScaler"):
        refuse_scaler(made, "fsdp2-offload")
    refuse_other_gpus(torch.device("cuda", 0), "fsdp2-offload")
    with pytest.raises(Unavailable, match="CUDA_VISIBLE_DEVICES"):
        refuse_other_gpus(torch.device("cuda", 1), "fsdp2-offload")


def test_fsdp2_trains_as_the_plain_step_does():
    """In a process of its own: a process group can be joined once."""
    env = os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip().endswith("as plain"), done.stderr
