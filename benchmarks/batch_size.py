"""memfit's search for a batch size beside brute force, accelerate's and Lightning's, on a GPU.

    PYTHONPATH=src python3 benchmarks/batch_size.py -o benchmarks/results/batch-size.json

Each workload is searched under one hard cap by every finder: the size it reaches, its runs and its
seconds, and with memfit the largest batch that a plan allows at the same cap. Brute force halves an
interval until two neighbours are left. Finished workloads in the output file are kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import add_command, heading, load_report, say

import memfit
from memfit.measure.cuda_allocator import prefer_expandable_segments, settle_optimizer_state
from memfit.measure.memory import memory_cap
from memfit.measure.step import is_out_of_memory, run_step, untouched
from memfit.targets import resolve_target
from memfit.train.batch_size.rebatch import rebatch
from memfit.workload import Workload

WORKLOADS: dict[str, tuple[str, dict[str, Any], float]] = {
    "gpt2 seq 512 bf16": ("transformers:gpt2", {"batch": 2, "seq": 512, "dtype": "bf16"}, 8.0),
    "resnet50": ("torchvision:resnet50", {"batch": 8}, 6.0),
    "vit_b_16": ("torchvision:vit_b_16", {"batch": 4}, 8.0),
}
STEPS = 3  # of every trial
STARTING_SIZE = 1024  # where accelerate begins
Fits = Callable[[int], bool]


class Trials:
    """Runs sizes under the cap and counts them."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.count = 0

    def run(self, size: int) -> None:
        """Some steps of a batch of this size; out of memory where they do not fit."""
        self.count += 1
        workload = self.workload
        with untouched(workload):
            whole = workload.batch
            try:
                workload.batch = rebatch(whole, size)
                for _ in range(STEPS):
                    run_step(workload)
                    settle_optimizer_state(workload.optimizer, workload.device)
            finally:
                workload.batch = whole

    def fits(self, size: int) -> bool:
        """Whether they do."""
        try:
            self.run(size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            fits = False
        else:
            fits = True
        gc.collect()
        torch.cuda.empty_cache()
        return fits


def brute_force(workload: Workload) -> tuple[int, int]:
    """The largest size that runs, exactly, and the runs that took."""
    trials = Trials(workload)
    low, high = 1, 2
    while trials.fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if trials.fits(middle) else (low, middle)
    return low, trials.count


def by_accelerate(workload: Workload) -> tuple[int, int]:
    """What accelerate's decorator comes down to."""
    from accelerate.utils import find_executable_batch_size

    trials = Trials(workload)

    def train(batch_size: int) -> int:
        trials.run(batch_size)
        return batch_size

    found: int = find_executable_batch_size(train, starting_batch_size=STARTING_SIZE)()
    return found, trials.count


def by_lightning(workload: Workload) -> tuple[int, int]:
    """What Lightning's tuner finds by halving an interval."""
    import lightning
    from lightning.pytorch.tuner import Tuner

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trials = 0

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.batch_size = workload.model, 2

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return workload.loss_fn(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            kind = type(workload.optimizer)
            made: torch.optim.Optimizer = kind(
                self.model.parameters(), **workload.optimizer.defaults
            )
            return made

        def train_dataloader(self) -> Any:
            nonlocal trials
            trials += 1
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
    found = Tuner(trainer).scale_batch_size(
        module, mode="binsearch", steps_per_trial=STEPS, init_val=2
    )
    return int(found or module.batch_size), trials


FINDERS: dict[str, Callable[[Workload], tuple[int, int]]] = {
    "brute force": brute_force,
    "accelerate": by_accelerate,
    "lightning": by_lightning,
}


def search_all(name: str, rows: dict[str, Any], save: Callable[[], None]) -> None:
    """Fill the rows of one workload, each finder on a workload of its own."""
    target, options, gib = WORKLOADS[name]
    budget = int(gib * 2**30)
    build = partial(resolve_target, target, device="cuda", **options)
    if "memfit" not in rows:
        say(f"{name}: memfit")
        begun = time.perf_counter()
        found = memfit.find_batch_size(build(), budget, steps=STEPS)
        rows["memfit"] = {
            "size": found.largest.size,
            "runs": len(found.trials),
            "seconds": time.perf_counter() - begun,
            "fastest_size": found.fastest.size,
            "samples_per_s": found.largest.samples_per_s,
            "best_samples_per_s": found.fastest.samples_per_s,
        }
        save()
    for finder, find in FINDERS.items():
        if finder in rows:
            continue
        say(f"{name}: {finder}")
        workload = build()
        prefer_expandable_segments(workload.device)
        begun = time.perf_counter()
        try:
            with memory_cap(workload.device, budget):
                size, runs = find(workload)
            rows[finder] = {"size": size, "runs": runs, "seconds": time.perf_counter() - begun}
        except Exception as error:  # a peer that cannot do it is a row that says so
            rows[finder] = {"error": f"{type(error).__name__}: {error}"[:200]}
        del workload
        gc.collect()
        torch.cuda.empty_cache()
        save()
    if "memfit with a plan" not in rows:
        say(f"{name}: memfit with a plan")
        begun = time.perf_counter()
        found = memfit.find_batch_size(
            build(), budget, steps=STEPS, with_plan=True, executor="module"
        )
        planned = found.planned
        rows["memfit with a plan"] = {
            "size": found.largest.size if planned is None else planned.size,
            "runs": len(found.trials),
            "seconds": time.perf_counter() - begun,
            "samples_per_s": None if planned is None else planned.samples_per_s,
        }
        save()


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("batch-size.json"))
    parser.add_argument("--only", nargs="*", default=list(WORKLOADS), help="names of workloads")
    arguments = parser.parse_args()
    report = load_report(arguments.output, "workloads")
    add_command(report)

    def save() -> None:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
        arguments.output.with_suffix(".md").write_text(markdown(report))

    for name in arguments.only:
        search_all(name, report["workloads"].setdefault(name, {}), save)
    save()
    print(markdown(report))


if __name__ == "__main__":
    main()
