"""memfit's search for a batch size beside brute force, accelerate's and Lightning's, on a GPU.

    PYTHONPATH=src python3 benchmarks/batch_size.py -o benchmarks/results/batch-size.json

Each workload is searched under one hard cap by every finder: the size it reaches, its runs and its
seconds, and with memfit the largest batch that a plan allows at the same cap. Brute force halves an
interval until two neighbours are left. Finished workloads in the output file are kept.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from common import arguments_of, fill, heading, say

import memfit
from memfit.measure.memory import memory_cap
from memfit.measure.step import run_step, untouched
from memfit.targets import resolve_target
from memfit.train.batch_size.find import MAX_SIZE
from memfit.train.batch_size.planned import largest_planned
from memfit.train.batch_size.rebatch import rebatch
from memfit.train.batch_size.trial import run_trial
from memfit.workload import Workload

WORKLOADS: dict[str, tuple[str, dict[str, Any], float]] = {
    "gpt2 seq 512 bf16": ("transformers:gpt2", {"batch": 2, "seq": 512, "dtype": "bf16"}, 8.0),
    "resnet50": ("torchvision:resnet50", {"batch": 8}, 6.0),
    "vit_b_16": ("torchvision:vit_b_16", {"batch": 4}, 8.0),
}
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
            kind, options = type(workload.optimizer), workload.optimizer.defaults
            return kind(self.model.parameters(), **options)

        def train_dataloader(self) -> Any:
            nonlocal runs
            runs += 1
            return torch.utils.data.DataLoader(
                range(10**6),  # type: ignore[arg-type]
                batch_size=self.batch_size,
                collate_fn=lambda items: rebatch(workload.batch, len(items)),
            )

    trainer = lightning.Trainer(
        accelerator="gpu" if workload.device.type == "cuda" else "cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    with memory_cap(workload.device, budget):
        found = Tuner(trainer).scale_batch_size(
            module, mode="binsearch", steps_per_trial=STEPS, init_val=2
        )
    return int(found or module.batch_size), runs


FINDERS: dict[str, Finder] = {
    "brute force": brute_force,
    "accelerate": by_accelerate,
    "lightning": by_lightning,
}


def search_all(name: str) -> dict[str, Any]:
    """The rows of one workload, each finder on a workload of its own."""
    target, options, gib = WORKLOADS[name]
    budget = int(gib * 2**30)
    rows = by_memfit(resolve_target(target, device="cuda", **options), budget)
    for finder, find in FINDERS.items():
        gc.collect()
        torch.cuda.empty_cache()
        say(f"{name}: {finder}")
        workload = resolve_target(target, device="cuda", **options)
        begun = time.perf_counter()
        try:
            size, runs = find(workload, budget)
            rows[finder] = {"size": size, "runs": runs, "seconds": time.perf_counter() - begun}
        except Exception as error:  # a peer that cannot do it is a row that says so
            rows[finder] = {"error": f"{type(error).__name__}: {error}"[:200]}
        del workload
    return rows


def by_memfit(workload: Workload, budget: int) -> dict[str, Any]:
    """What memfit finds without a plan, and with one on top of that."""
    make_batch = partial(rebatch, workload.batch)
    begun = time.perf_counter()
    found = memfit.find_batch_size(workload, budget, steps=STEPS)
    seconds = time.perf_counter() - begun
    with_plan = largest_planned(
        workload,
        found,
        make_batch,
        max_size=MAX_SIZE,
        allow=None,
        executor="module",
        steps=STEPS,
        progress=say,
    )
    planned = with_plan.planned or found.largest
    return {
        "memfit": {
            "size": found.largest.size,
            "runs": len(found.trials),
            "seconds": seconds,
            "fastest_size": found.fastest.size,
            "samples_per_s": found.largest.samples_per_s,
            "best_samples_per_s": found.fastest.samples_per_s,
        },
        "memfit with a plan": {
            "size": planned.size,
            "runs": len(found.trials),
            "seconds": time.perf_counter() - begun,
            "samples_per_s": planned.samples_per_s,
        },
    }


def markdown(report: dict[str, Any]) -> str:
    """All rows as a Markdown table."""
    lines = [
        *heading("Batch sizes: memfit's finder, brute force and others", report),
        "| workload, cap | finder | size | / brute force | runs | seconds | samples/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in report["workloads"].items():
        cap = f"{name}, {WORKLOADS[name][2] * 1024:.0f} MB"
        exact = rows.get("brute force", {}).get("size")
        for finder, row in rows.items():
            if "error" in row:
                lines.append(f"| {cap} | {finder} | {row['error']} | | | | |")
                continue
            share = f"{row['size'] / exact:.2f}" if exact else ""
            speed = f"{row['samples_per_s']:.0f}" if row.get("samples_per_s") else ""
            if row.get("fastest_size") not in (None, row["size"]):
                speed += f" ({row['best_samples_per_s']:.0f} at {row['fastest_size']})"
            lines.append(
                f"| {cap} | {finder} | {row['size']} | {share} | {row['runs']} "
                f"| {row['seconds']:.1f} | {speed} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing and print the table."""
    arguments = arguments_of(__doc__, "batch-size.json", WORKLOADS).parse_args()
    fill(arguments.output, "workloads", arguments.only, search_all, markdown)


if __name__ == "__main__":
    main()
