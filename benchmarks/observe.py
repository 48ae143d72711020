"""What it costs to observe a training loop, and whether what is seen adds up.

    PYTHONPATH=src python3 benchmarks/observe.py -o benchmarks/results/observe.json

Short loops run in turn: plain, with a memory profiler (four phases a step, with their
seconds), with a live line as well, and plain again. Nothing waits for the device inside a loop, so
that what the profiler costs the host can hide as it does while training. Then the profiler's peak
is compared with one measured by itself, and the components of a step are added up. Finished rows
in the output file are kept.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
from common import MIB, Unit, heading, open_report, parser_of, run_units
from rich.console import Console
from workloads import build

from memfit.measure.memory import measure_peak
from memfit.measure.step import drop_gradients, run_backward, run_first_steps, run_step
from memfit.measure.timing import Inside, ratio_by_rounds, time_interleaved
from memfit.measure.turns import alone
from memfit.observe import LiveLine, MemoryProfiler, component_times
from memfit.workload import Workload

CUDA = torch.cuda.is_available()
STEPS = 10 if CUDA else 2  # in a loop
ROUNDS = 20
# With about the seconds they take on an H200: not measured.
ON_CUDA = {"gpt2@8x1024 bf16": 60, "encoder@64x128": 30, "gpt2@4x64": 25}
ON_CPU = {"encoder@8x64, 4 layers": 120}
WORKLOADS = ON_CUDA | ON_CPU


def train(workload: Workload, phase: Callable[[str], AbstractContextManager[None]]) -> None:
    """One step, with its phases."""
    with phase("forward"):
        loss = workload.compute_loss()
    with phase("backward"):
        run_backward(workload, loss)
    with phase("optimizer"):
        workload.optimizer.step()
        drop_gradients(workload)


def plain_loop(workload: Workload) -> None:
    """The loop nobody observes."""
    for _ in range(STEPS):
        train(workload, lambda name: nullcontext())


def observed(workload: Workload, live: bool) -> Inside:
    """The same loop with a profiler, and a line that is drawn to nowhere."""
    current: list[MemoryProfiler] = []

    @contextmanager
    def around() -> Iterator[None]:
        console = Console(file=io.StringIO(), force_terminal=True, width=120)
        with MemoryProfiler(workload.device) as memory:
            with LiveLine(memory, samples=1, console=console) if live else nullcontext():
                current[:] = [memory]
                yield

    def loop() -> None:
        memory = current[0]
        for _ in memory.steps(range(STEPS)):
            train(workload, memory.phase)

    return Inside(around, loop)


@alone()
def empty_step_s(device: torch.device) -> float:
    """Seconds of a profiled step in which nothing is done: what the host pays, hidden or not."""
    with MemoryProfiler(device) as memory:
        seconds = []
        for _ in range(10):
            start = time.perf_counter()
            for _ in memory.steps(range(50)):
                for name in ("forward", "backward", "optimizer"):
                    with memory.phase(name):
                        pass
            seconds.append((time.perf_counter() - start) / 50)
    return median(seconds)


def measured(name: str, tiny: bool) -> dict[str, Any]:
    """The row of one workload."""
    workload = build(name, tiny=tiny)
    for group in workload.optimizer.param_groups:
        group["lr"] = 0.0  # a batch learned by heart has tiny gradients, which CPUs are slow with
    run_first_steps(workload)
    works: dict[str, Any] = {
        "plain": lambda: plain_loop(workload),
        "profiled": observed(workload, live=False),
        "live line": observed(workload, live=True),
        "plain again": lambda: plain_loop(workload),
    }
    times = time_interleaved(works, workload.device, rounds=ROUNDS, warmup=2, limit_s=60)
    alone = measure_peak(workload, lambda: run_step(workload))
    with MemoryProfiler(workload.device, counts=None if CUDA else "live") as memory:
        for _ in memory.steps(range(3)):
            train(workload, memory.phase)
    return {
        "loop_steps": STEPS,
        "over_plain": {
            kind: ratio_by_rounds(timing.samples, times["plain"].samples)
            for kind, timing in times.items()
        },
        "step_s": {kind: timing.median_s / STEPS for kind, timing in times.items()},
        "spread_s": {kind: timing.spread_s / STEPS for kind, timing in times.items()},
        "peak_bytes": {"profiler": memory.peak_usage_bytes, "alone": alone.bytes},
        "peak_phase": memory.peak_phase,
        "empty_step_s": empty_step_s(workload.device),
        "components_over_step": component_times(workload, [workload.batch]).accounted_share,
    }


def markdown(report: dict[str, Any]) -> str:
    """All rows as a Markdown table."""
    lines = [
        *heading("What observing a loop costs", report),
        "Overheads are against the plain step of the same run; A/A is plain again against plain: "
        "medians of the ratios of all rounds, with the interval that the true median lies in in 19 "
        "of 20 cases, or where there is none of medians. Steps are medians of loops, with half the "
        "distance of the quartiles. The last column is what a profiled step costs in which nothing "
        "is done: where the host is what the step waits for, that is the overhead.",
        "",
        "| workload | steps a loop | plain step | profiler | and live line | A/A | spread | "
        "profiler's peak / measured alone | components / step | empty step / plain |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in report["workloads"].items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} |" + " |" * 8)
            continue
        plain, peaks = row["step_s"]["plain"], row["peak_bytes"]
        over = [over_plain(row, kind) for kind in ("profiled", "live line", "plain again")]
        lines.append(
            f"| {name} | {row['loop_steps']} | {plain * 1e3:.2f} ms | {' | '.join(over)} "
            f"| {row['spread_s']['plain'] / plain:.2%} "
            f"| {peaks['profiler'] / MIB:.1f} / {peaks['alone'] / MIB:.1f} MB "
            f"| {row['components_over_step']:.1%} "
            f"| {row['empty_step_s'] * 1e6:.0f} us, {row['empty_step_s'] / plain:.2%} |"
        )
    return "\n".join(lines) + "\n"


def over_plain(row: dict[str, Any], kind: str) -> str:
    """How much longer a kind of loop took than the plain one, in a cell of the table."""
    if "over_plain" not in row:
        return f"{row['step_s'][kind] / row['step_s']['plain'] - 1:+.2%}"
    ratio, low, high = (number - 1 for number in row["over_plain"][kind])
    return f"{ratio:+.2%} ({low:+.2%} to {high:+.2%})"


def main() -> None:
    """Run what is missing and print the table."""
    parser = parser_of(__doc__, "observe.json", WORKLOADS)
    parser.set_defaults(only=list(ON_CUDA if CUDA else ON_CPU))
    arguments = parser.parse_args()
    report = open_report(arguments, "workloads")
    units = [
        Unit(report["workloads"], name, partial(measured, name, arguments.tiny), name, seconds)
        for name, seconds in WORKLOADS.items()
        if name in arguments.only
    ]
    run_units(arguments, report, units, markdown)


if __name__ == "__main__":
    main()
