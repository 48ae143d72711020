"""Estimates made without a GPU beside peaks measured on one, plain and with all recomputed.

    PYTHONPATH=src python3 benchmarks/estimates.py -o benchmarks/results/estimates.json

An estimate traces the step on tensors without memory, before anything is put on the GPU. Then the
step runs there by its modules, plain and with everything recomputed, without a cap: by the leanest
of plans that recompute segments one by one and in runs of 2, 4 and 8, as the estimate does (earlier
results are of one by one alone). Finished rows in the output file are kept.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from common import MIB, Unit, heading, open_report, parser_of, run_units
from workloads import device_here, target_of

import memfit
from memfit.measure.memory import measure_peak
from memfit.measure.step import run_step, untouched
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime.apply import Applied
from memfit.targets import resolve_target

# With about the seconds they take on an H200: not measured.
WORKLOADS = {
    "llama-1b@2x2048 bf16": 45,
    "gpt2@8x1024 bf16": 15,
    "gpt2-large@8x1024 bf16": 35,
    "vit_b_16@64": 15,
    "resnet152@64": 25,
}


def beside(name: str, tiny: bool) -> dict[str, Any]:
    """The estimates of one workload and its measured peaks."""
    target, options = target_of(name, tiny=tiny)
    made = memfit.estimate(target, **options)
    workload = resolve_target(target, device=device_here(), **options)
    profile = memfit.profile(workload, executor="module")
    assert profile.baseline is not None
    plans = [
        make_plan(profile, goal)
        for goal in (
            Goal(strategy="all"),
            *(Goal(strategy="interval", interval=length) for length in (2, 4, 8)),
        )
    ]
    plan = min(plans, key=lambda plan: plan.predicted.peak_bytes)
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
        if "error" in rows:
            lines.append(f"| {name} | {rows['error']} | | | |")
            continue
        for step, row in rows.items():
            error = row["estimated"] / row["measured"] - 1
            lines.append(
                f"| {name} | {step} | {row['estimated'] / MIB:.0f} MB "
                f"| {row['measured'] / MIB:.0f} MB | {error:+.1%} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing and print the table."""
    arguments = parser_of(__doc__, "estimates.json", WORKLOADS).parse_args()
    report = open_report(arguments, "workloads")
    units = [
        Unit(report["workloads"], name, partial(beside, name, arguments.tiny), name, seconds)
        for name, seconds in WORKLOADS.items()
        if name in arguments.only
    ]
    run_units(arguments, report, units, markdown)


if __name__ == "__main__":
    main()
