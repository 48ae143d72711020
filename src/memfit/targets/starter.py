"""The workload file that `memfit init` writes."""

from __future__ import annotations

from pathlib import Path

from memfit.errors import UsageError

_TEXT = '''\
"""A training step for memfit. Try: memfit fit {file}:workload --budget 60%"""

import torch

import memfit


def loss_fn(model, batch):  # one number that training lowers
    inputs, targets = batch
    return torch.nn.functional.cross_entropy(model(inputs), targets)


# --batch and --device on the command line arrive here; other parameters come from --set.
def workload(batch=4096, device="cuda" if torch.cuda.is_available() else "cpu", width=512):
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(8)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 10)).to(device)  # your model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    # An example of one batch: real data or random, of the shapes you train with.
    example = torch.randn(batch, width, device=device), torch.randint(10, (batch,), device=device)
    return memfit.Workload(model, loss_fn, optimizer, example)
'''


def write_starter(path: Path) -> None:
    """Write a small workload file to `path`, which must not exist yet."""
    if path.suffix != ".py":
        raise UsageError(f"{str(path)!r} does not end in .py", hint=f"try {path}.py")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(_TEXT.replace("{file}", path.name))
    except FileExistsError as error:
        raise UsageError(
            f"{str(path)!r} exists already and is left as it is",
            hint="choose another name: memfit init other_workload.py",
        ) from error
    except OSError as error:
        raise UsageError(
            f"{str(path)!r} cannot be written: {error.strerror}",
            hint="choose a folder that exists and is yours to write to",
        ) from error
