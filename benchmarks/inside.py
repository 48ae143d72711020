"""Per-tensor plans on compiled segments beside torch.compile and checkpointing, on a GPU.

    PYTHONPATH=src python3 benchmarks/inside.py -o benchmarks/results/inside.json

Each workload is fitted at static + 80, 60, 50 and 40 % of (peak - static) of the unplanned step
(and at --budgets): run under the hard cap, numbers compared. With --setup, techniques of the loss
and the optimizer are at work at the --setup-budgets. With --match, plans are also made for the live
peak of every peer. Then every system is timed in turn, in one run, with the first one twice (A/A).
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from common import MIB, add_command, heading, load_report, save_report
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.capture.learn import learn_variants
from memfit.errors import InfeasibleError, MemfitError
from memfit.fitted import Fitted
from memfit.ir.codec import to_data
from memfit.ir.plan import Plan
from memfit.ir.profile import Profile
from memfit.measure.memory import measure_peak
from memfit.measure.step import run_step, untouched
from memfit.measure.timing import Inside, time_interleaved
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.techniques import STEP
from memfit.runtime.apply import Applied
from memfit.runtime.calls import replaced_forward
from memfit.runtime.setup import Setup
from memfit.targets import resolve_target
from memfit.whole_step import setup_of, tile_for

BEGUN = time.perf_counter()
SHARES = (0.8, 0.6, 0.5, 0.4)
LESSONS = 2  # plans that are run to learn about their variants
WORKLOADS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "gpt2-large@8x1024 bf16": (
        "transformers:gpt2-large",
        {"batch": 8, "seq": 1024, "dtype": "bf16"},
        (16 * 10**9,),
    ),
    "vit_b_16@64": ("torchvision:vit_b_16", {"batch": 64}, ()),
    "encoder@256x128": ("encoder", {"batch": 256, "seq": 128}, ()),
    "resnet50@64": ("torchvision:resnet50", {"batch": 64}, ()),
    "resnet152@64": ("torchvision:resnet152", {"batch": 64}, ()),
}
Step = Callable[[], Any]


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("inside.json"))
    parser.add_argument("--only", nargs="*", default=list(WORKLOADS), help="names of workloads")
    parser.add_argument("--shares", nargs="*", type=float, default=list(SHARES))
    parser.add_argument("--whole", nargs="*", type=float, default=[], metavar="BUDGET")
    parser.add_argument("--block", nargs="*", type=float, default=[0.5, 0.2, 0.05])
    parser.add_argument("--fits-only", action="store_true", help="budgets, without the systems")
    parser.add_argument("--match", action="store_true", help="plans at each peer's peak, too")
    parser.add_argument("--no-whole", action="store_true", help="no whole-model torch.compile")
    parser.add_argument("--setup", nargs="*", default=[], choices=STEP, metavar="TECHNIQUE")
    parser.add_argument("--budgets", nargs="*", type=float, metavar="GB", help="of 10^9 bytes")
    parser.add_argument("--setup-budgets", nargs="*", type=float, default=[], metavar="GB")
    parser.add_argument("--profiles", type=Path, metavar="DIR", help="keep the profiles there")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    report = load_report(arguments.output, "workloads")
    add_command(report)

    def save() -> None:
        save_report(arguments.output, report, markdown(report))

    for name in arguments.only:
        rows = report["workloads"].setdefault(name, {"fits": {}, "systems": {}})
        Comparison(name, rows, arguments, save).run()
        gc.collect()
        torch.cuda.empty_cache()
    save()
    print(markdown(report))


class Comparison:
    """One workload: fitted at its budgets, then timed beside the peers."""

    def __init__(
        self, name: str, rows: dict[str, Any], arguments: argparse.Namespace, save: Step
    ) -> None:
        self.name, self.rows, self.arguments, self.save = name, rows, arguments, save
        target, options, self.budgets = WORKLOADS[name]
        if arguments.budgets is not None:
            self.budgets = tuple(int(gb * 10**9) for gb in arguments.budgets)
        self.workload = resolve_target(target, device="cuda", **options)
        self.systems: dict[str, Step] = {}
        self.setup: Setup | None = None
        self.learned: Profile | None = None  # with what the fits without a set-up learned

    def run(self) -> None:
        """Fit, build the peers, then time everything in turn."""
        begun = time.perf_counter()
        profile = memfit.profile(self.workload, progress=_say)
        self.rows["profile_s"] = time.perf_counter() - begun
        self._keep(profile, "plain")
        assert profile.baseline is not None
        static, peak = profile.graph.fixed_bytes, profile.baseline.peak_bytes
        shares = {f"{s:.0%}": int(static + s * (peak - static)) for s in self.arguments.shares}
        plans = self._fit_all(profile, shares | {_gb(budget): budget for budget in self.budgets})
        if self.arguments.setup:
            names = self.arguments.setup
            budgets = [int(gb * 10**9) for gb in self.arguments.setup_budgets]
            tile_bytes = tile_for(min(budgets, default=None))
            self.setup = setup_of(names, self.workload, profile, tile_bytes)
            self.rows["setup"] = names
            measured = memfit.profile(self.workload, setup=self.setup, progress=_say)
            self._keep(measured, "set-up")
            text = f" with {', '.join(names)}"
            plans |= self._fit_all(measured, {_gb(budget) + text: budget for budget in budgets})
        if self.rows["systems"] or self.arguments.fits_only:
            return
        blocks = [c.module for c in profile.graph.calls if c.graph >= 0 and not c.leaf]
        with untouched(self.workload):
            self._add_memfit(plans)
            self._add_peers(blocks)
            peaks = {name: self._peak(name, step) for name, step in list(self.systems.items())}
        matches = self._matches(self.learned or profile, peaks) if self.arguments.match else []
        with untouched(self.workload):
            peaks |= {name: self._peak(name, self.systems[name]) for name in matches}
            works = {name: self.systems[name] for name, peak in peaks.items() if peak is not None}
            first = next(iter(works))
            works[f"{first} again"] = works[first]
            timings = time_interleaved(
                works, self.workload.device, rounds=self.arguments.steps, warmup=2
            )
        for name, timing in timings.items():
            self.rows["systems"][name] = {
                **(peaks.get(name) or {}),
                "step_s": timing.median_s,
                "spread_s": timing.spread_s,
            }
        self.save()

    def _keep(self, profile: Profile, kind: str) -> None:
        """Write a profile, to plan from it on another machine."""
        folder = self.arguments.profiles
        if folder is not None:
            path = folder / f"{self.name.replace(' ', '-')}.{kind}.profile.json.gz"
            path.write_bytes(gzip.compress(json.dumps(to_data(profile)).encode()))

    def _fit_all(self, profile: Profile, wanted: dict[str, int]) -> dict[str, Plan]:
        plans: dict[str, Plan] = {}
        for key, budget in wanted.items():
            _say(f"{self.name} {key}")
            begun = time.perf_counter()
            try:
                fitted = memfit.fit_workload(
                    self.workload,
                    budget,
                    profiled=profile,
                    steps=self.arguments.steps,
                    allow="recompute",
                    progress=_say,
                )
            except InfeasibleError as refusal:
                self.rows["fits"][key] = {
                    "budget_bytes": budget,
                    "minimum_bytes": refusal.minimum_bytes,
                    "why": refusal.message,
                }
                self.save()
                continue
            fitted.undo()
            plans[key] = fitted.plan
            profile = fitted.profile  # what one fit learned about its variants helps the next
            if not fitted.plan.setup:
                self.learned = profile
            seconds = time.perf_counter() - begun
            self.rows["fits"][key] = {"fit_s": seconds, **_fit_row(fitted)}
            self.save()
        return plans

    def _add_memfit(self, plans: dict[str, Plan]) -> None:
        model = self.workload.model
        some = next(iter(plans.values()), None)
        if some is not None:
            unplanned = Applied(some.unplanned(), model)
            self.systems["memfit unplanned"] = self._inside(lambda: unplanned)
        set_up = next((plan for plan in plans.values() if plan.setup), None)
        if set_up is not None:
            kept = Applied(set_up.unplanned(), model, self.setup)
            self.systems["memfit unplanned, set up"] = self._inside(lambda: kept)
        for key, plan in plans.items():
            applied = Applied(plan, model, self.setup if plan.setup else None)
            self.systems[f"memfit {key}"] = self._inside(lambda applied=applied: applied)

    def _add_peers(self, blocks: Sequence[str]) -> None:
        self.systems["eager"] = lambda: run_step(self.workload)
        self.systems["eager, blocks checkpointed"] = self._blocks(blocks, None, again=True)
        self.systems["blocks compiled"] = self._blocks(blocks, 1.0)
        self.systems["blocks compiled and checkpointed"] = self._blocks(blocks, 1.0, again=True)
        for budget in self.arguments.block:
            self.systems[f"blocks compiled, budget {budget:g}"] = self._blocks(blocks, budget)
        if not self.arguments.no_whole:
            for budget in (1.0, *self.arguments.whole):
                text = "" if budget == 1.0 else f", budget {budget:g}"
                self.systems[f"torch.compile{text}"] = self._whole(budget)

    def _matches(self, profile: Profile, peaks: dict[str, Any]) -> list[str]:
        """Add a plan of recompute at each peer's own peak; return their names."""
        live = replace(profile, allocator=None)  # equal live bytes, as the peers are counted
        assert profile.baseline is not None
        names = []
        for peer, seen in peaks.items():
            if peer.startswith("memfit") or seen is None:
                continue
            if seen["peak_bytes"] >= profile.baseline.peak_bytes:
                continue
            name = f"memfit at the peak of: {peer}"
            _say(f"{self.name}: planning {name}")
            goal = Goal(budget_bytes=seen["peak_bytes"])
            try:
                plan = make_plan(live, goal)
                for _ in range(LESSONS):
                    learned = learn_variants(self.workload, live, plan)
                    if learned is None:
                        break
                    live, plan = learned, make_plan(learned, goal, known=plan)
            except InfeasibleError as refusal:
                self.rows["systems"][name] = {"error": refusal.message[:200]}
                continue
            applied = Applied(plan, self.workload.model)
            self.systems[name] = self._inside(lambda applied=applied: applied)
            names.append(name)
        return names

    def _peak(self, name: str, step: Step) -> dict[str, Any] | None:
        """Compile and warm up, then the peak of two steps; None when it cannot run."""
        _say(f"{self.name}: {name}")
        begun = time.perf_counter()
        try:
            for _ in range(3):
                step()
        except (RuntimeError, MemfitError) as error:
            self.rows["systems"][name] = {"error": str(error).splitlines()[0][:200]}
            return None
        setup = time.perf_counter() - begun
        torch.cuda.empty_cache()
        peak = measure_peak(self.workload, lambda: (step(), step()))
        return {
            "peak_bytes": peak.bytes,
            "reserved_bytes": peak.reserved_bytes,
            "first_steps_s": setup,
        }

    def _inside(self, around: Callable[[], AbstractContextManager[Any]]) -> Step:
        return Inside(around, lambda: run_step(self.workload))

    def _blocks(self, names: Sequence[str], budget: float | None, *, again: bool = False) -> Step:
        """Blocks compiled (unless `budget` is None) and recomputed whole (if `again`)."""
        modules = dict(self.workload.model.named_modules())
        own = None if budget is None else _own(_call_forward)
        compiled = None if own is None else torch.compile(own, dynamic=False)

        def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if compiled is None:
                    return forward(*args, **kwargs)
                return compiled(forward, args, kwargs)

            def recomputed(*args: Any, **kwargs: Any) -> Any:
                return checkpoint(run, *args, use_reentrant=False, **kwargs)

            return recomputed if again else run

        @contextmanager
        def at_work() -> Iterator[None]:
            with ExitStack() as stack:
                stack.enter_context(_memory_budget(budget or 1.0))
                for name in names:
                    stack.enter_context(replaced_forward(modules[name], wrap))
                yield

        return self._inside(at_work)

    def _whole(self, budget: float) -> Step:
        workload = self.workload

        def loss(batch: Any) -> Any:
            return workload.loss_fn(workload.model, batch)

        compiled = torch.compile(_own(loss), dynamic=False)

        def step() -> None:
            compiled(workload.batch).backward()
            workload.optimizer.step()
            workload.optimizer.zero_grad(set_to_none=True)

        return Inside(lambda: _memory_budget(budget), step)


def _call_forward(forward: Any, args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _own(function: Any) -> Any:
    """The function with a code object of its own: dynamo keeps compiled code by code object."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{id(object())}")
    return FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)


def _memory_budget(budget: float) -> AbstractContextManager[Any]:
    if budget == 1.0:
        return nullcontext()
    return functorch_config.patch(activation_memory_budget=budget)


def _fit_row(fitted: Fitted) -> dict[str, Any]:
    result, plan = fitted.result, fitted.plan
    return {
        "budget_bytes": result.budget_bytes,
        "rounds": result.rounds,
        "predicted_peak_bytes": result.predicted.peak_bytes,
        "measured_peak_bytes": result.measured.peak_bytes,
        "predicted_reserved_bytes": result.predicted.peak_reserved_bytes,
        "measured_reserved_bytes": result.measured.peak_reserved_bytes,
        "retries": result.measured.retries,
        "predicted_step_s": result.predicted.step_s,
        "predicted_time_ratio": result.predicted.time_ratio,
        "measured_step_s": result.measured.step_s,
        "unplanned_step_s": result.baseline.step_s,
        "unplanned_peak_bytes": result.baseline.peak_bytes,
        "static_bytes": result.baseline.static_bytes,
        "same_code_ratio": result.measured.same_code_ratio,
        "numerics": vars(result.numerics),
        "gap": result.predicted.gap,
        "plan_s": result.plan_s,
        "trim": plan.trim,
        "decisions": "".join(s.decision[0] for s in plan.segments),
        "variants": len(plan.variants),
        "minimum_feasible_bytes": result.minimum_feasible_bytes,
    }


def markdown(report: dict[str, Any]) -> str:
    """All rows as Markdown tables."""
    title = "Inside the segment: per-tensor plans beside torch.compile and checkpointing"
    lines = [
        *heading(title, report),
        "| workload | budget | predicted peak | measured peak | reserved | retries "
        "| time / unplanned (predicted) | A/A | numbers |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in report["workloads"].items():
        lines += [_fit_line(name, key, row) for key, row in rows["fits"].items()]
    lines += ["", "| workload | system | peak | step | / first row |", "|---|---|---|---|---|"]
    for name, rows in report["workloads"].items():
        systems = rows["systems"]
        base = next((r["step_s"] for r in systems.values() if "step_s" in r), 1.0)
        for system, row in sorted(systems.items(), key=lambda item: -item[1].get("peak_bytes", 0)):
            if "error" in row:
                lines.append(f"| {name} | {system} | {row['error']} | | |")
                continue
            peak = f"{row['peak_bytes'] / MIB:.0f} MB" if "peak_bytes" in row else ""
            lines.append(
                f"| {name} | {system} | {peak} | {row['step_s'] * 1e3:.1f} ms "
                f"± {row['spread_s'] * 1e3:.1f} | {row['step_s'] / base:.3f} |"
            )
    return "\n".join(lines) + "\n"


def _fit_line(name: str, key: str, row: dict[str, Any]) -> str:
    budget = f"{row['budget_bytes'] / MIB:.0f} MB"
    if "why" in row:
        minimum = (row["minimum_bytes"] or 0) / MIB
        return f"| {name} {key} | {budget} | refused: the minimum is {minimum:.0f} MB | | | | | | |"
    error = row["predicted_peak_bytes"] / row["measured_peak_bytes"] - 1
    predicted = row.get("predicted_time_ratio")
    ratio = ""  # where the unplanned step was not timed beside it
    if row["unplanned_step_s"] is not None:
        ratio = f"{row['measured_step_s'] / row['unplanned_step_s']:.3f} "
        predicted = predicted or row["predicted_step_s"] / row["unplanned_step_s"]
    same = "" if row["same_code_ratio"] is None else f"{row['same_code_ratio']:.3f}"
    numbers = row["numerics"]
    errors = numbers["error_vs_reference"]
    said = "bitwise" if numbers["bitwise_vs_unplanned"] else f"{numbers['grad_max_rel_diff']:.1e}"
    if errors:
        said += f" ({errors['planned']:.1e} / {errors['unplanned']:.1e} from fp32)"
    return (
        f"| {name} {key} | {budget} | {row['predicted_peak_bytes'] / MIB:.0f} MB "
        f"| {row['measured_peak_bytes'] / MIB:.0f} MB ({error:+.1%}) "
        f"| {row['measured_reserved_bytes'] / MIB:.0f} MB | {row['retries']} "
        f"| {ratio}({predicted:.3f}) | {same} | {said} |"
    )


def _gb(budget: int) -> str:
    return f"{budget / 10**9:g} GB"


def _say(text: str) -> None:
    print(f"{time.perf_counter() - BEGUN:6.1f} s  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
