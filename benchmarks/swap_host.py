"""What moving memory to the host costs the host: processor seconds of steps that do little else.

    PYTHONPATH=src python3 benchmarks/swap_host.py -o benchmarks/results/swap-host.json

Tensors are tiny, so that a step is nearly all Python. It runs in turn unplanned, with a plan that
moves nothing, with hooks around one segment whose tensors are all too small to move, with the
largest tensors of one segment moved, with all of one, of four and of every segment moved, inside a
safety valve with memory to spare, and unplanned again. Differences are those within a round.
Finished rows in the output file are kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from common import Unit, heading, open_report, parser_of, run_units

import memfit
from memfit.ir.plan import OFFLOAD, Plan
from memfit.measure.step import run_first_steps, run_step
from memfit.runtime.apply import Applied
from memfit.targets import resolve_target

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDS, WARMUP = 60, 5
SECONDS = 60  # for each workload, on a CPU
HOST_BYTES = 2**24
NONE, AGAIN = "unplanned", "unplanned again"
VALVE = "safety valve 0.99"
_RESNET = {
    "embedding_size": "4",
    "hidden_sizes": "8,8,8,8",
    "image_size": "32",
    "num_labels": "10",
}
_GPT2 = {"n_layer": "24", "n_embd": "16", "n_head": "2", "vocab_size": "50"}
WORKLOADS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "resnet-152, module": (
        "module",
        "transformers:resnet-152",
        {"batch": 2, "overrides": _RESNET},
    ),
    "gpt2 with 24 blocks, graph": (
        "graph",
        "transformers:gpt2",
        {"batch": 1, "seq": 8, "overrides": _GPT2},
    ),
}


def moving(plan: Plan, calls: Collection[int], smallest: int = 1) -> Plan:
    """A plan that keeps everything, with these calls' memory on the host from the next but one."""
    variants, segments = list(plan.variants), list(plan.segments)
    for call in calls:
        segment, point = segments[call], min(call + 2, len(segments))
        number = segment.variant
        if number is not None:
            variants.append(replace(variants[number], offloaded=variants[number].saved))
            number = len(variants) - 1
        segments[call] = replace(
            segment, variant=number, release=point, prefetch=point, decision=OFFLOAD
        )
    return replace(
        plan,
        segments=tuple(segments),
        variants=tuple(variants),
        host_bytes=HOST_BYTES,
        smallest_move_bytes=smallest,
    )


def plans_for(plan: Plan) -> dict[str, Plan]:
    """The ways to run the step, from a plan that keeps everything."""
    kind = statistics.mode(s.kind for s in plan.segments)
    blocks = [i for i, s in enumerate(plan.segments) if s.kind == kind]
    middle = len(blocks) // 2
    one, four = blocks[middle : middle + 1], blocks[middle : middle + 4]
    found = {"nothing moved": plan}
    if plan.executor == "module":
        largest = max(a.bytes for a in plan.segments[one[0]].activations)
        found["one segment, too small to move"] = moving(plan, one, 2**40)
        found["one segment, its largest tensors"] = moving(plan, one, largest)
    return found | {
        "one segment": moving(plan, one),
        "four segments": moving(plan, four),
        "every block": moving(plan, blocks),
    }


def measured(name: str, rounds: int) -> dict[str, Any]:
    """The rows of one workload."""
    executor, target, options = WORKLOADS[name]
    workload = resolve_target(target, device=DEVICE, **options)
    run_first_steps(workload)
    none = memfit.plan(memfit.profile(workload, executor=executor), strategy="none")
    applied = {n: Applied(p, workload.model) for n, p in plans_for(none).items()}
    unplanned = nullcontext() if executor == "module" else Applied(none, workload.model)
    systems: dict[str, AbstractContextManager[Any]]
    systems = {NONE: unplanned, **applied}
    if executor == "module":
        systems[VALVE] = memfit.pressure(
            0.99, capacity=2**40, device=DEVICE, min_tensor_bytes=1, host_budget=HOST_BYTES
        )
    systems[AGAIN] = unplanned
    seconds: dict[str, list[float]] = {system: [] for system in systems}
    for number in range(WARMUP + rounds):
        for system, around in systems.items():
            with around:
                run_step(workload)  # not timed: it finds the caches as another system left them
                start = time.process_time()
                run_step(workload)
                spent = time.process_time() - start
                if DEVICE.type == "cuda":
                    torch.cuda.synchronize()
            if number >= WARMUP:
                seconds[system].append(spent)
    moves = {n: a.swap.statistics() for n, a in applied.items() if a.swap is not None}
    return {
        "segments": len(none.segments),
        "rows": {
            system: {
                "host_s": statistics.median(samples),
                "least_s": min(samples),
                "extra_s": _quartiles(samples, seconds[NONE]),
                "moves": moves[system].per_step(moves[system].moves) if system in moves else 0,
            }
            for system, samples in seconds.items()
        },
    }


def _quartiles(samples: list[float], beside: list[float]) -> list[float]:
    return statistics.quantiles((s - b for s, b in zip(samples, beside, strict=True)), n=4)


def markdown(report: dict[str, Any]) -> str:
    """All rows as a Markdown table."""
    lines = [
        *heading("What moving memory costs the host", report),
        f"Processor time of the process in a step, medians of {ROUNDS} rounds (fewer with --tiny); "
        "extra is the median of the differences to the unplanned step of the same round, with "
        "their quartiles, and the difference between the least of both.",
        "",
        "| workload | step | tensors moved | host | extra | quartiles | extra, least |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in report["workloads"].items():
        if "error" in found:
            lines.append(f"| {name} | {found['error']} |" + " |" * 5)
            continue
        least_s = found["rows"][NONE]["least_s"]
        for system, row in found["rows"].items():
            low, extra, high = row["extra_s"]
            lines.append(
                f"| {name}, {found['segments']} segments | {system} | {row['moves']:.0f} "
                f"| {row['host_s'] * 1e3:.2f} ms | {extra * 1e3:+.2f} ms "
                f"| {low * 1e3:+.2f} to {high * 1e3:+.2f} ms "
                f"| {(row['least_s'] - least_s) * 1e3:+.2f} ms |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing and print the table."""
    torch.set_num_threads(1)
    arguments = parser_of(__doc__, "swap-host.json", WORKLOADS).parse_args()
    report = open_report(arguments, "workloads")
    rounds = arguments.steps if arguments.tiny else ROUNDS  # the tensors are tiny in any case
    units = [
        Unit(report["workloads"], name, partial(measured, name, rounds), name, SECONDS)
        for name in arguments.only
    ]
    run_units(arguments, report, units, markdown)


if __name__ == "__main__":
    main()
