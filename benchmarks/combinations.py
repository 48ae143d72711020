"""Every combination of techniques on one workload, measured: no percentages are multiplied.

    PYTHONPATH=src python3 benchmarks/combinations.py -o benchmarks/results/combinations.json

Activations kept or all recomputed, with and without each technique of the loss and the optimizer:
peak, reserved bytes and seconds of each combination, timed in turn with the plain step twice.
"""

from __future__ import annotations

import argparse
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import torch
from common import MIB, add_command, heading, load_report, save_report, say
from swapping.session import TINY, WORKLOADS
from swapping.systems import System, a_a_spread, measure_systems

import memfit
from memfit.planning.techniques import APPROXIMATE, STEP
from memfit.runtime.apply import Applied
from memfit.targets import resolve_target
from memfit.whole_step import setup_of

TILE_BYTES = 2**28
EXACT = [name for name in STEP if name not in APPROXIMATE]
PLAIN = "plain"


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("combinations.json"))
    parser.add_argument("--workloads", nargs="+", default=["gpt2-large@8x1024 bf16"])
    parser.add_argument("--executor", default="module", choices=("module", "graph", "inductor"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="models of a few layers, to try it out")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    report = load_report(arguments.output, "workloads")
    add_command(report)
    for name in arguments.workloads:
        key = f"{name}, {arguments.executor}"
        if key not in report["workloads"]:
            report["workloads"][key] = measure(name, arguments)
            save_report(arguments.output, report, markdown(report))
    print(markdown(report))


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All combinations of one workload."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target, options = (TINY if arguments.tiny else WORKLOADS)[name]
    workload = resolve_target(target, device=device, **options)
    say(f"{name}: profile")
    profile = memfit.profile(workload, executor=arguments.executor)
    recomputed = memfit.plan(profile, strategy="all")
    systems = {}
    for plan in (recomputed.unplanned(), recomputed):
        for names in chain.from_iterable(combinations(EXACT, n) for n in range(len(EXACT) + 1)):
            setup = setup_of(names, workload, profile, TILE_BYTES) if names else None
            words = [*(["recompute"] if plan is recomputed else []), *names]
            applied = Applied(plan, workload.model, setup)
            systems[" + ".join(words) or PLAIN] = System.of(applied)
    rows = measure_systems(workload, systems, arguments.steps)
    return {"rows": rows, "a_a": a_a_spread(rows, PLAIN), "static_bytes": recomputed.static_bytes}


def markdown(report: dict[str, Any]) -> str:
    """One table for each workload, the lowest peak last."""
    lines = heading("Combinations of techniques", report)
    for name, found in report["workloads"].items():
        plain = found["rows"][PLAIN]
        lines += [f"## {name} (A/A {found['a_a']:.1%})", ""]
        lines += [
            "| techniques | peak | of plain | reserved | step | / plain |",
            "|---|---|---|---|---|---|",
        ]
        rows = {k: r for k, r in found["rows"].items() if "peak_bytes" in r}
        for key, row in sorted(rows.items(), key=lambda item: -item[1]["peak_bytes"]):
            lines.append(
                f"| {key} | {row['peak_bytes'] / MIB:.0f} MB "
                f"| {row['peak_bytes'] / plain['peak_bytes']:.0%} "
                f"| {row['reserved_bytes'] / MIB:.0f} MB "
                f"| {row['step_s'] * 1e3:.1f} ms ± {row['spread_s'] * 1e3:.1f} "
                f"| {row['step_s'] / plain['step_s']:.3f} |"
            )
        lines += [f"- {k}: {r['error']}" for k, r in found["rows"].items() if "error" in r]
        lines.append("")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
