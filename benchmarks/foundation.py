"""Budgets held, predictions beside measurements, and plain checkpointing beside memfit, on a GPU.

    PYTHONPATH=src python3 benchmarks/foundation.py -o benchmarks/results/foundation.json

Each workload is fitted at static + 75, 50 and 35 % of (peak - static): measured under the hard cap,
numbers compared, time interleaved with the plain step. Then torch.utils.checkpoint on half and on
all blocks is timed in turn with a memfit plan of the same peak. Finished rows in the output file
are kept, so a run that was cut off goes on where it stopped.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import MIB, heading, load_report, save_report
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.errors import InfeasibleError
from memfit.ir.profile import Profile
from memfit.measure.memory import measure_peak
from memfit.measure.step import run_step, untouched
from memfit.measure.timing import Inside, time_interleaved
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime.apply import Applied
from memfit.runtime.calls import replaced_forward
from memfit.targets import resolve_target
from memfit.workload import Workload

SHARES = (0.75, 0.5, 0.35)
WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet50@64": ("torchvision:resnet50", {"batch": 64}),
    "vit_b_16@64": ("torchvision:vit_b_16", {"batch": 64}),
    "encoder@256x128": ("encoder", {"batch": 256, "seq": 128}),
    "resnet152@64": ("torchvision:resnet152", {"batch": 64}),
    "gpt2-large@8x1024 bf16": (
        "transformers:gpt2-large",
        {"batch": 8, "seq": 1024, "dtype": "bf16"},
    ),
}
REDUCTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet50@16": ("torchvision:resnet50", {"batch": 16}),
    "vit_b_16@16": ("torchvision:vit_b_16", {"batch": 16}),
}
Rows = dict[str, dict[str, Any]]


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("foundation.json"))
    parser.add_argument("--only", nargs="*", help="names of workloads")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--executor", default="module", choices=("module", "graph", "inductor"))
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    report = load_report(arguments.output, "workloads", "reductions")
    names = arguments.only or [*WORKLOADS, *REDUCTIONS]

    def save() -> None:
        save_report(arguments.output, report, markdown(report))

    for name in names:
        if name in REDUCTIONS and name not in report["reductions"]:
            report["reductions"][name] = reduce_activations(name, arguments.steps)
            save()
    for name in names:
        if name in WORKLOADS:
            rows = report["workloads"].setdefault(name, {})
            fit_and_compare(name, rows, arguments.executor, arguments.steps, save)
            save()
    print(markdown(report))


def fit_and_compare(
    name: str, rows: Rows, executor: str, steps: int, save: Callable[[], None]
) -> None:
    """Fill the rows of one workload: its budgets, then the checkpointing peers."""
    wanted = [f"{share:.0%}" for share in SHARES]
    if all(key in rows for key in [*wanted, "peers"]):
        return
    target, options = WORKLOADS[name]
    workload = resolve_target(target, device="cuda", **options)
    begun = time.perf_counter()
    profile = memfit.profile(workload, executor=executor)
    seconds = time.perf_counter() - begun
    rows["profile"] = {"executor": executor, "seconds": seconds, **_plain(profile)}
    assert profile.baseline is not None
    static, peak = profile.graph.fixed_bytes, profile.baseline.peak_bytes
    if "peers" not in rows:
        rows["peers"] = beside_checkpointing(workload, profile, steps)
        save()
    for share, key in zip(SHARES, wanted, strict=True):
        if key not in rows:
            print(name, key, file=sys.stderr)
            rows[key] = fit_budget(workload, profile, int(static + share * (peak - static)), steps)
            save()
    del workload, profile
    gc.collect()
    torch.cuda.empty_cache()


def fit_budget(workload: Workload, profile: Profile, budget: int, steps: int) -> dict[str, Any]:
    """Plan, run under the cap, compare numbers and time."""
    try:
        fitted = memfit.fit_workload(
            workload, budget, profiled=profile, steps=steps, allow="recompute"
        )
    except InfeasibleError as refusal:
        return {
            "budget_bytes": budget,
            "verdict": "infeasible",
            "minimum_bytes": refusal.minimum_bytes,
            "why": refusal.message,
        }
    fitted.undo()
    result, plan = fitted.result, fitted.plan
    return {
        "budget_bytes": budget,
        "verdict": result.verdict,
        "rounds": result.rounds,
        "predicted_peak_bytes": result.predicted.peak_bytes,
        "measured_peak_bytes": result.measured.peak_bytes,
        "predicted_reserved_bytes": result.predicted.peak_reserved_bytes,
        "measured_reserved_bytes": result.measured.peak_reserved_bytes,
        "retries": result.measured.retries,
        "predicted_step_s": result.predicted.step_s,
        "predicted_time_ratio": result.predicted.time_ratio,
        "measured_step_s": result.measured.step_s,
        "spread_s": result.measured.step_s_spread,
        "plain_step_s": result.baseline.step_s,
        "same_code_ratio": result.measured.same_code_ratio,
        "bitwise": result.numerics.bitwise_vs_unplanned,
        "numerics_note": result.numerics.note,
        "gap": result.predicted.gap,
        "plan_s": result.plan_s,
        "trim": plan.trim,
        "recomputed": sum(s.decision == "recompute" for s in plan.segments),
        "segments": len(plan.segments),
        "minimum_feasible_bytes": result.minimum_feasible_bytes,
    }


def beside_checkpointing(workload: Workload, profile: Profile, steps: int) -> dict[str, Any]:
    """Time checkpointed halves and wholes in turn with memfit plans of the same peak."""
    blocks = [c.module for c in profile.graph.calls if not c.leaf and c.pinned is None]
    chosen = {"half": blocks[: len(blocks) // 2], "all": blocks}
    live = replace(profile, allocator=None)  # equal live peaks, as the peers are counted
    works: dict[str, Callable[[], None]] = {"plain": lambda: _plain_step(workload)}
    rows: dict[str, Any] = {}
    with untouched(workload):
        for name, modules in chosen.items():
            works[f"checkpoint {name}"] = _checkpointed_step(workload, modules)
            peak = _steady_peak(workload, works[f"checkpoint {name}"])
            plan = make_plan(live, Goal(budget_bytes=peak))
            works[f"memfit {name}"] = _planned_step(workload, Applied(plan, workload.model))
            rows[f"checkpoint {name}"] = {"peak_bytes": peak}
            planned = _steady_peak(workload, works[f"memfit {name}"])
            rows[f"memfit {name}"] = {
                "peak_bytes": planned,
                "predicted_peak_bytes": plan.predicted.peak_bytes,
                "predicted_step_s": plan.predicted.step_s,
            }
        works["plain again"] = works["plain"]
        timings = time_interleaved(works, workload.device, rounds=steps, warmup=3)
    for name, timing in timings.items():
        rows.setdefault(name, {}).update(step_s=timing.median_s, spread_s=timing.spread_s)
    return rows


def reduce_activations(name: str, steps: int) -> dict[str, Any]:
    """activation_reduction=0.40, max_slowdown=1.20: estimate beside measurement."""
    target, options = REDUCTIONS[name]
    workload = resolve_target(target, device="cuda", **options)
    try:
        fitted = memfit.fit_workload(
            workload,
            None,
            activation_reduction=0.40,
            max_slowdown=1.20,
            steps=steps,
            executor="graph",
            allow="recompute",
        )
    except InfeasibleError as refusal:
        return {"verdict": "infeasible", "why": refusal.message}
    result = fitted.result
    fitted.undo()
    base, static = result.baseline.peak_bytes, result.baseline.static_bytes
    return {
        "verdict": result.verdict,
        "estimated_cut": (base - result.predicted.peak_bytes) / (base - static),
        "measured_cut": (base - result.measured.peak_bytes) / (base - static),
        "saved_bytes": base - result.measured.peak_bytes,
        "estimated_slowdown": result.predicted.step_s / fitted.plan.baseline_step_s,
        "measured_slowdown": result.measured.time_ratio,
        "same_code_ratio": result.measured.same_code_ratio,
        "segments": sum(s.decision != "keep" for s in fitted.plan.segments),
        "executor": fitted.plan.executor,
        "bitwise": result.numerics.bitwise_vs_unplanned,
        "grad_max_rel_diff": result.numerics.grad_max_rel_diff,
        "error_vs_reference": result.numerics.error_vs_reference,
    }


def markdown(report: dict[str, Any]) -> str:
    """All rows as Markdown tables."""
    lines = [
        *heading("Foundation: budgets, predictions and plain checkpointing", report),
        "| workload | budget | predicted peak | measured peak | reserved | retries "
        "| time / plain (predicted) | A/A | bitwise |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in report["workloads"].items():
        for key, row in rows.items():
            if key.endswith("%"):
                lines.append(_budget_line(f"{name} {key}", row))
    lines += ["", "| workload | system | peak | step | / plain |", "|---|---|---|---|---|"]
    for name, rows in report["workloads"].items():
        plain = rows.get("peers", {}).get("plain", {}).get("step_s")
        for system, row in rows.get("peers", {}).items():
            peak = f"{row['peak_bytes'] / MIB:.0f} MB" if "peak_bytes" in row else ""
            if system == "plain":
                peak = f"{rows['profile']['peak_bytes'] / MIB:.0f} MB"
            lines.append(
                f"| {name} | {system} | {peak} | {row['step_s'] * 1e3:.1f} ms "
                f"± {row['spread_s'] * 1e3:.1f} | {row['step_s'] / plain:.3f} |"
            )
    lines += [
        "",
        "| activations -40 %, at most +20 % time | cut estimated | cut measured "
        "| time estimated | time measured | A/A | segments | bitwise |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in report["reductions"].items():
        if row["verdict"] != "fits":
            lines.append(f"| {name} | {row['why']} | | | | | | |")
            continue
        lines.append(
            f"| {name} | {row['estimated_cut']:.1%} | {row['measured_cut']:.1%} "
            f"| {row['estimated_slowdown']:.3f}x | {row['measured_slowdown']:.3f}x "
            f"| {row['same_code_ratio']:.3f} | {row['segments']} | {row['bitwise']} |"
        )
    return "\n".join(lines) + "\n"


def _budget_line(name: str, row: dict[str, Any]) -> str:
    budget = f"{row['budget_bytes'] / MIB:.0f} MB"
    if row["verdict"] == "infeasible":
        minimum = f"{row['minimum_bytes'] / MIB:.0f} MB"
        return f"| {name} | {budget} | refused: the minimum is {minimum} | | | | | | |"
    error = row["predicted_peak_bytes"] / row["measured_peak_bytes"] - 1
    ratio = row["measured_step_s"] / row["plain_step_s"]
    predicted = row.get("predicted_time_ratio") or row["predicted_step_s"] / row["plain_step_s"]
    return (
        f"| {name} | {budget} | {row['predicted_peak_bytes'] / MIB:.0f} MB "
        f"| {row['measured_peak_bytes'] / MIB:.0f} MB ({error:+.1%}) "
        f"| {row['measured_reserved_bytes'] / MIB:.0f} MB, {row['verdict']} | {row['retries']} "
        f"| {ratio:.3f} ({predicted:.3f}) | {row['same_code_ratio']:.3f} | {row['bitwise']} |"
    )


def _plain(profile: Profile) -> dict[str, Any]:
    assert profile.baseline is not None
    return {
        "peak_bytes": profile.baseline.peak_bytes,
        "reserved_bytes": profile.baseline.peak_reserved_bytes,
        "static_bytes": profile.graph.fixed_bytes,
        "step_s": profile.step_s,
        "trim_s": profile.trim_s,
    }


def _plain_step(workload: Workload) -> None:
    run_step(workload)


def _planned_step(workload: Workload, applied: Applied) -> Inside:
    return Inside(lambda: applied, lambda: run_step(workload))


def _checkpointed_step(workload: Workload, modules: list[str]) -> Inside:
    return Inside(lambda: _checkpointed(workload.model, modules), lambda: run_step(workload))


@contextmanager
def _checkpointed(model: torch.nn.Module, names: list[str]) -> Iterator[None]:
    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(replaced_forward(modules[name], wrap))
        yield


def _steady_peak(workload: Workload, step: Callable[[], None]) -> int:
    step()
    return measure_peak(workload, step).bytes


if __name__ == "__main__":
    main()
