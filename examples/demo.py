"""make demo: a training step that is over its budget, then the same step fitted into it."""

from __future__ import annotations

import sys

import torch
from rich.console import Console

import memfit
from memfit.measure.memory import measure_peak, memory_cap
from memfit.measure.step import run_step, untouched
from memfit.planning.budget import baseline_peak_bytes
from memfit.report.fit import fit_report, summary_line
from memfit.targets import resolve_target
from memfit.units import format_bytes

CUDA = torch.cuda.is_available()
# A transformer language model whose activations are most of its peak; larger on a GPU.
SIZES = {"batch": 64, "seq": 256} if CUDA else {"batch": 16, "seq": 128}
FIELDS = (
    {"n_layer": "12", "vocab_size": "8000"}
    if CUDA
    else {"n_layer": "6", "n_embd": "256", "n_head": "4", "n_ff": "1024", "vocab_size": "2000"}
)
SHARE = 0.5  # of the activations: the budget is everything static and half of the rest


def main() -> int:
    """Show the plain step over the budget, the fitted one under it, and the proof."""
    console = Console()
    device = "cuda" if CUDA else "cpu"
    workload = resolve_target("encoder", device=device, overrides=FIELDS, **SIZES)

    console.print("[bold]1. Measure the step as it is[/]")
    profile = memfit.profile(workload, executor="graph")  # torch's own kernels: bit for bit
    plain, static = baseline_peak_bytes(profile), profile.graph.fixed_bytes
    budget = int(static + SHARE * (plain - static))
    console.print(
        f"   peak {format_bytes(plain)}, of which {format_bytes(static)} are parameters, "
        f"gradients, optimizer state and batch\n   the budget: [bold]{format_bytes(budget)}[/]\n"
    )

    console.print("[bold]2. Run it plainly under that budget[/]")
    console.print(f"   {run_plainly(workload, budget)}\n")

    console.print("[bold]3. Fit it[/]")
    fitted = memfit.fit_workload(workload, budget, profiled=profile, steps=10)
    for part in fit_report(fitted.result, fitted.plan):
        console.print(part)
    with fitted:
        loss = fitted.step(workload.batch)
    console.print(f"   one fitted training step: loss {loss.item():.4f}\n")
    command = "memfit init && memfit fit workload.py:workload --budget 60%"
    console.print(summary_line(fitted.result, command))
    return 0 if fitted.result.numerics.bitwise_vs_unplanned else 1


def run_plainly(workload: memfit.Workload, budget: int) -> str:
    """Say what becomes of the plain step under the budget."""
    with untouched(workload), memory_cap(workload.device, budget):
        try:
            run_step(workload)
            peak = measure_peak(workload, lambda: run_step(workload)).bytes
        except torch.OutOfMemoryError as error:
            return f"[red]out of memory[/]: {str(error).split('. ')[0]}"
    over = format_bytes(peak - budget)
    return f"[red]over[/]: it takes {format_bytes(peak)}, {over} more than the budget"


if __name__ == "__main__":
    sys.exit(main())
