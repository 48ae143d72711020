"""Estimates made without a GPU beside peaks measured on one, plain and with all recomputed.

    PYTHONPATH=src python3 benchmarks/estimates.py -o benchmarks/results/estimates.json

An estimate traces the step on tensors without memory, before anything is put on the GPU. Then the
step runs there by its modules, plain and with every segment recomputed, without a cap. Finished
rows in the output file are kept.
"""

from __future__ import annotations

from typing import Any

from common import MIB, arguments_of, fill, heading

import memfit
from memfit.measure.memory import measure_peak
from memfit.measure.step import run_step, untouched
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime.apply import Applied
from memfit.targets import resolve_target

WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2@8x1024 bf16": ("transformers:gpt2", {"batch": 8, "seq": 1024, "dtype": "bf16"}),
    "gpt2-large@8x1024 bf16": (
        "transformers:gpt2-large",
        {"batch": 8, "seq": 1024, "dtype": "bf16"},
    ),
    "llama-1b@2x2048 bf16": ("transformers:llama-1b", {"batch": 2, "seq": 2048, "dtype": "bf16"}),
    "vit_b_16@64": ("torchvision:vit_b_16", {"batch": 64}),
    "resnet152@64": ("torchvision:resnet152", {"batch": 64}),
}


def beside(name: str) -> dict[str, Any]:
    """The estimates of one workload and its measured peaks."""
    target, options = WORKLOADS[name]
    made = memfit.estimate(target, **options)
    workload = resolve_target(target, device="cuda", **options)
    profile = memfit.profile(workload, executor="module")
    assert profile.baseline is not None
    plan = make_plan(profile, Goal(strategy="all"))
    with untouched(workload), Applied(plan, workload.model):
        run_step(workload)
        run_step(workload)
        recomputed = measure_peak(workload, lambda: run_step(workload))
    return {
        "plain": {"estimated": made.peak_bytes, "measured": profile.baseline.peak_bytes},
        "all recomputed": {
            "estimated": made.needs.recompute_bytes,
            "measured": recomputed.bytes,
        },
    }


def markdown(report: dict[str, Any]) -> str:
    """All rows as a Markdown table."""
    lines = [
        *heading("Estimates without a GPU beside measurements", report),
        "| workload | step | estimated | measured | error |",
        "|---|---|---|---|---|",
    ]
    for name, rows in report["workloads"].items():
        for step, row in rows.items():
            error = row["estimated"] / row["measured"] - 1
            lines.append(
                f"| {name} | {step} | {row['estimated'] / MIB:.0f} MB "
                f"| {row['measured'] / MIB:.0f} MB | {error:+.1%} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing and print the table."""
    arguments = arguments_of(__doc__, "estimates.json", WORKLOADS).parse_args()
    fill(arguments.output, "workloads", arguments.only, beside, markdown)


if __name__ == "__main__":
    main()
