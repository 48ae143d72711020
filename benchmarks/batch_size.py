"""memfit's search for a batch size beside brute force, accelerate's and Lightning's, on a GPU.

    PYTHONPATH=src python3 benchmarks/batch_size.py -o benchmarks/results/batch-size.json

Each workload is searched under one hard cap by every finder: the size it reaches, its runs and its
seconds, and with memfit the largest batch that a plan allows at the same cap. Brute force halves an
interval until two neighbours are left. A finder that is not installed is a row that says so.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from common import Report, Unit, heading, open_report, parser_of, run_units, say
from workloads import build, device_here

import memfit
from memfit.measure.cuda_allocator import prefer_expandable_segments
from memfit.measure.memory import memory_cap
from memfit.measure.step import run_step, untouched
from memfit.train.batch_size.rebatch import rebatch
from memfit.train.batch_size.trial import run_trial
from memfit.workload import Workload

# With their caps in GiB. Of GPT-2's samples of 512 tokens so few fit that one is a tenth of them.
WORKLOADS = {
    "gpt2@2x128 bf16": 8.0,
    "gpt2@2x512 bf16": 8.0,
    "resnet50@8": 6.0,
    "vit_b_16@4": 8.0,
}
TINY_CAP = 2**24
STEPS = 3  # of every trial
STARTING_SIZE = 1024  # where accelerate begins
# The workload and the cap; the size reached and the runs it took.
Finder = Callable[[Workload, int], tuple[int, int]]


def brute_force(workload: Workload, budget: int) -> tuple[int, int]:
    """The largest size that holds the budget, exactly."""
    runs = 0

    def holds(size: int) -> bool:
        nonlocal runs
        runs += 1
        return run_trial(workload, size, budget, partial(rebatch, workload.batch), steps=1).holds

    low, high = 1, 2
    while holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, runs


def by_accelerate(workload: Workload, budget: int) -> tuple[int, int]:
    """What accelerate's decorator comes down to."""
    from accelerate.utils import find_executable_batch_size

    runs = 0

    def train(batch_size: int) -> int:
        nonlocal runs
        runs += 1
        sized = replace(workload, batch=rebatch(workload.batch, batch_size))
        with untouched(sized):
            for _ in range(STEPS):
                run_step(sized)
        return batch_size

    with memory_cap(workload.device, budget):
        found: int = find_executable_batch_size(train, starting_batch_size=STARTING_SIZE)()
    return found, runs


def by_lightning(workload: Workload, budget: int) -> tuple[int, int]:
    """What Lightning's tuner finds by halving an interval."""
    import lightning
    from lightning.pytorch.tuner import Tuner

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    runs = 0

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.batch_size = workload.model, 2

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return workload.loss_fn(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            kind, usual = type(workload.optimizer), workload.optimizer.defaults
            takes = inspect.signature(kind).parameters  # not all that it notes
            return kind(self.model.parameters(), **{k: usual[k] for k in takes if k in usual})

        def train_dataloader(self) -> Any:
            nonlocal runs
            runs += 1
            return torch.utils.data.DataLoader(
                range(10**6),  # type: ignore[arg-type]
                batch_size=self.batch_size,
                collate_fn=lambda items: rebatch(workload.batch, len(items)),
            )

    folder = tempfile.TemporaryDirectory(prefix="memfit-bench-")  # for the weights it puts aside
    trainer = lightning.Trainer(
        default_root_dir=folder.name,
        accelerator="gpu" if workload.device.type == "cuda" else "cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    with folder, memory_cap(workload.device, budget):
        found = Tuner(trainer).scale_batch_size(
            module, mode="binsearch", steps_per_trial=STEPS, init_val=2
        )
    return int(found or module.batch_size), runs


FINDERS: dict[str, Finder] = {
    "accelerate": by_accelerate,
    "lightning": by_lightning,
    "brute force": brute_force,
}
OURS, PLANNED = "memfit", "memfit with a plan"
# Seconds of each finder on an H200: not measured.
SECONDS = {OURS: 15.0, "brute force": 45.0, PLANNED: 60.0, "accelerate": 20.0, "lightning": 30.0}


def search(name: str, finder: str, cap: int, tiny: bool) -> dict[str, Any]:
    """What one finder reaches, on a workload of its own.

    memfit has the allocator take memory page by page, which stays so: then for all alike, and from
    the first weight on.
    """
    prefer_expandable_segments(device_here())
    workload = build(name, tiny=tiny)
    if finder in (OURS, PLANNED):
        return by_memfit(workload, cap, with_plan=finder == PLANNED)
    begun = time.perf_counter()
    size, runs = FINDERS[finder](workload, cap)
    return {"size": size, "runs": runs, "seconds": time.perf_counter() - begun}


def by_memfit(workload: Workload, budget: int, *, with_plan: bool) -> dict[str, Any]:
    """What memfit finds without a plan, or with one on top of that."""
    begun = time.perf_counter()
    found = memfit.find_batch_size(
        workload, budget, with_plan=with_plan, executor="module", steps=STEPS, progress=say
    )
    best = found.planned or found.largest
    row = {
        "size": best.size,
        "runs": len(found.trials),
        "seconds": time.perf_counter() - begun,
        "samples_per_s": best.samples_per_s,
    }
    if with_plan:
        return row | {"notes": list(found.notes)}
    return row | {
        "trials": [
            {"size": t.size, "holds": t.holds, "live": t.peak_bytes, "held": t.peak_reserved_bytes}
            for t in found.trials
        ],
        "fastest_size": found.fastest.size,
        "best_samples_per_s": found.fastest.samples_per_s,
    }


def markdown(report: dict[str, Any]) -> str:
    """All rows as a Markdown table."""
    lines = [
        *heading("Batch sizes: memfit's finder, brute force and others", report),
        "| workload, cap | finder | size | / brute force | runs | seconds | samples/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in report["workloads"].items():
        cap = f"{name}, {WORKLOADS[name] * 1024:.0f} MB"
        exact = rows.get("brute force", {}).get("size")
        for finder, row in rows.items():
            if "error" in row:
                lines.append(f"| {cap} | {finder} | {row['error']} | | | | |")
                continue
            share = f"{row['size'] / exact:.2f}" if exact else ""
            speed = f"{row['samples_per_s']:.0f}" if row.get("samples_per_s") else ""
            if row.get("fastest_size") not in (None, row["size"]):
                speed += f" ({row['best_samples_per_s']:.0f} at {row['fastest_size']})"
            # What is counted are trials of the plain step.
            runs = f"{row['runs']}, and fits" if finder == PLANNED else row["runs"]
            lines.append(
                f"| {cap} | {finder} | {row['size']} | {share} | {runs} "
                f"| {row['seconds']:.1f} | {speed} |"
            )
    return "\n".join(lines) + "\n"


def units(arguments: argparse.Namespace, report: Report) -> Iterator[Unit]:
    """Every finder on every workload."""
    for finder, seconds in SECONDS.items():
        for name in arguments.only:
            rows = report["workloads"].setdefault(name, {})
            cap = TINY_CAP if arguments.tiny else int(WORKLOADS[name] * 2**30)
            run = partial(search, name, finder, cap, arguments.tiny)
            yield Unit(rows, finder, run, f"{name}: {finder}", seconds)


def main() -> None:
    """Run what is missing and print the table."""
    arguments = parser_of(__doc__, "batch-size.json", WORKLOADS).parse_args()
    report = open_report(arguments, "workloads")
    run_units(arguments, report, units(arguments, report), markdown)


if __name__ == "__main__":
    main()
