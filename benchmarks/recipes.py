"""Recipes under their caps, on a GPU: predicted and measured peak, and tokens per second.

    PYTHONPATH=src python3 benchmarks/recipes.py -o benchmarks/results/recipes.json

Each is fitted with every exact technique allowed, so with what a recipe's preset allows, and run
under the hard cap of the card it stands for. Beside it stands what an earlier guide expected for
that size of model without having run it. Finished rows in the output file are kept.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

from common import MIB, Unit, heading, open_report, parser_of, run_units, say
from workloads import build

import memfit
from memfit.errors import InfeasibleError
from memfit.planning.techniques import ACTIVATIONS, APPROXIMATE, STEP

NOTHING = "nothing"
ALLOW = [*ACTIVATIONS, *(name for name in STEP if name not in APPROXIMATE)]
# Workload, cap, what the guide expected, and about the seconds on an H200: not measured.
RECIPES: dict[str, tuple[str, str, str, float]] = {
    "gpt2, 8x1024, 4 GiB": ("gpt2@8x1024 bf16", "4GiB", "2-4 GB", 90),
    "gpt2-large, 8x1024, 16 GiB": (
        "gpt2-large@8x1024 bf16",
        "16GiB",
        "10-14 GB, 80-100 tokens/s",
        170,
    ),
    "gpt2-xl, 4x1024, 16 GiB": ("gpt2-xl@4x1024 bf16", "16GiB", "10-14 GB, 80-100 tokens/s", 270),
    # Less than its weights, their gradients and the optimizer's state take: 12.4 GB.
    "gpt2-large, 8x1024, 10 GB": ("gpt2-large@8x1024 bf16", "10GB", NOTHING, 170),
    "gpt2-large, 8x1024, 8 GiB": ("gpt2-large@8x1024 bf16", "8GiB", NOTHING, 170),
}
TINY_BUDGET = "75%"


def run_recipe(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Fit one recipe and train with it under its cap."""
    target, cap, _, _ = RECIPES[name]
    tiny, executor = arguments.tiny, arguments.executor
    workload = build(target, tiny=tiny)
    tokens = workload.batch_tensors()[0].numel()
    begun = time.perf_counter()
    try:
        fitted = memfit.fit_workload(
            workload,
            TINY_BUDGET if tiny else cap,
            allow=ALLOW,
            executor=executor,
            steps=arguments.steps,
            progress=say,
        )
    except InfeasibleError as refusal:
        return {"why": refusal.message, "minimum_bytes": refusal.minimum_bytes}
    seconds = time.perf_counter() - begun
    result = fitted.result
    fitted.undo()
    return {
        "budget_bytes": result.budget_bytes,
        "plain_peak_bytes": result.baseline.peak_bytes,
        "predicted_peak_bytes": result.predicted.peak_bytes,
        "measured_peak_bytes": result.measured.peak_bytes,
        "measured_reserved_bytes": result.measured.peak_reserved_bytes,
        "retries": result.measured.retries,
        "predicted_step_s": result.predicted.step_s,
        "measured_step_s": result.measured.step_s,
        "tokens_per_s": tokens / result.measured.step_s,
        "time_ratio": result.measured.time_ratio,
        "techniques": list(result.decisions.techniques),
        "executor": fitted.plan.executor,
        "numbers_agree": result.numerics.kept,
        "note": result.numerics.note,
        "fit_s": seconds,
    }


def markdown(report: dict[str, Any]) -> str:
    """All rows as a Markdown table."""
    lines = [
        *heading("Recipes under their caps", report),
        "| recipe | plain peak | predicted peak | measured peak | reserved | tokens/s "
        "| time / plain | techniques | the guide expected |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in report["recipes"].items():
        expected = RECIPES[name][2]
        if "error" in row:
            lines.append(f"| {name} | {row['error']} | | | | | | | {expected} |")
            continue
        if "why" in row:
            minimum = (row["minimum_bytes"] or 0) / MIB
            lines.append(
                f"| {name} | refused: the minimum is {minimum:.0f} MB | | | | | | | {expected} |"
            )
            continue
        error = row["predicted_peak_bytes"] / row["measured_peak_bytes"] - 1
        ratio = "-" if row["time_ratio"] is None else f"{row['time_ratio']:.2f}"
        lines.append(
            f"| {name} | {row['plain_peak_bytes'] / MIB:.0f} MB "
            f"| {row['predicted_peak_bytes'] / MIB:.0f} MB "
            f"| {row['measured_peak_bytes'] / MIB:.0f} MB ({error:+.1%}) "
            f"| {row['measured_reserved_bytes'] / MIB:.0f} MB | {row['tokens_per_s']:.0f} "
            f"| {ratio} | {', '.join(row['techniques'])} ({row['executor']}) | {expected} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing and print the table."""
    parser = parser_of(__doc__, "recipes.json", RECIPES)
    parser.add_argument("--executor", help="module, graph or inductor; left out: the usual one")
    arguments = parser.parse_args()
    report = open_report(arguments, "recipes")
    units = [
        Unit(report["recipes"], name, partial(run_recipe, name, arguments), name, seconds)
        for name, (*_, seconds) in RECIPES.items()
        if name in arguments.only
    ]
    run_units(arguments, report, units, markdown)


if __name__ == "__main__":
    main()
