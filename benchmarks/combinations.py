"""Every combination of techniques on one workload, measured: no percentages are multiplied.

    PYTHONPATH=src python3 benchmarks/combinations.py -o benchmarks/results/combinations.json

Activations kept, all recomputed or all moved to the host, with and without each technique of the
loss and the optimizer: peak, reserved bytes and seconds of each combination, each timed in turn
with the plain step twice. --techniques leaves some out, or takes `all`: what one of them costs by
itself is `--techniques tiled_loss --activations kept`. Of those that keep the optimizer's state
elsewhere or otherwise there is one at a time. int8_weights needs frozen weights: it has a table of
its own, in which the lower half of the blocks is frozen, by itself, with each other technique and
with as many as go together.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

from common import MIB, Report, Unit, heading, open_report, parser_of, run_units, say
from systems import System, a_a_spread, again, compared, compared_text, measure_systems
from workloads import build, device_here, freeze_lower_half

import memfit
from memfit.errors import UsageError
from memfit.fitted import Fitted
from memfit.ir.plan import Plan
from memfit.ir.profile import Profile
from memfit.measure.timing import Inside
from memfit.planning.techniques import APPROXIMATE, MICROBATCH, ON_HOST, ROUNDED_STATE, STEP
from memfit.runtime.apply import Applied
from memfit.runtime.setup import Setup
from memfit.runtime.split import part_of, refused_split
from memfit.ways import setup_of
from memfit.workload import Workload

TILE_BYTES = {"cuda": 2**28, "cpu": 2**20}
USUAL = [name for name in STEP if name not in (*APPROXIMATE, "step_on_host")]
STATE = (*ON_HOST, *ROUNDED_STATE)  # ways to keep the optimizer's state: one at a time
INT8 = "int8_weights"
EVERY = [*USUAL, "step_on_host", *ROUNDED_STATE, MICROBATCH, INT8]
ALL = "all"
PARTS = 2
PLAIN = "plain"
FROZEN = "lower half of the blocks frozen"
ACTIVATIONS = {"kept": "none", "recompute": "all", "offload": "swap"}
# Seconds on an H200, not measured: of the profile by `module`, and of one combination.
WORKLOADS = {
    "gpt2@8x1024 bf16": (10, 10),
    "gpt2-large@8x1024 bf16": (22, 25),
    "gpt2@4x64, 4 layers": (5, 5),
}
COMPILED = 2.0  # times as long by `inductor`
ON_CPU = (
    "On a CPU, of two cores that others use as well: seconds are noisy and no result, peaks are "
    "exact. It shows bytes, and that the combinations run. The host is the device itself: moved "
    "activations leave the peak and stay in the same memory; the optimizer's state on the host and "
    "the exact weights beside those in int8 are counted as before."
)


class Measured:
    """One workload with its profiles, one for each set of techniques when it captures."""

    def __init__(self, name: str, arguments: argparse.Namespace, *, frozen: bool = False) -> None:
        self.name, self.arguments, self.frozen = name, arguments, frozen
        self._workload: Workload | None = None
        self._profiles: dict[tuple[tuple[str, ...], int], Profile] = {}

    def close(self) -> None:
        """Let go of the workload."""
        self._workload, self._profiles = None, {}

    def measure(self, activations: str, techniques: Sequence[str]) -> dict[str, Any]:
        """One combination beside the plain step of the same executor."""
        if self._workload is None:
            self._workload = build(self.name, tiny=self.arguments.tiny)
            if self.frozen:
                freeze_lower_half(self._workload)
        workload = self._workload
        plain = self._plan("kept", ())
        systems = {PLAIN: System.of(Applied(plain, workload.model))}
        plan = self._plan(activations, techniques)
        planned = Applied(plan, workload.model, self._setup(techniques))
        systems["it"] = System.of(planned)
        if plan.split > 1:
            profile = self._profile(techniques)
            systems["it"] = replace(systems["it"], step=_in_parts(workload, planned, profile))
        rows = measure_systems(workload, systems, self.arguments.steps)
        return {
            **rows["it"],
            "plain": rows[PLAIN],
            "a_a": a_a_spread(rows, PLAIN),
            "by_rounds": compared(rows, "it", PLAIN),
            "a_a_by_rounds": compared(rows, again(PLAIN), PLAIN),
            "static_bytes": plain.static_bytes,
        }

    def _plan(self, activations: str, techniques: Sequence[str]) -> Plan:
        strategy = ACTIVATIONS[activations]
        plan = memfit.plan(self._profile(techniques), strategy=strategy)
        return plan.unplanned() if strategy == "none" else plan

    def _profile(self, techniques: Sequence[str]) -> Profile:
        """By a captured step the head is one of the segments, unless tiles are in its place.

        What saves nothing for other hooks to see, weights in int8, changes every profile.
        """
        assert self._workload is not None
        parts = PARTS if MICROBATCH in techniques else 1
        captures = self.arguments.executor != "module"
        at_work = tuple(name for name in techniques if name != MICROBATCH)
        key = tuple(name for name in at_work if captures or name == INT8), parts
        if key not in self._profiles:
            why = refused_split(self._workload) if parts > 1 else None
            if why is not None:
                raise UsageError(f"{MICROBATCH}: {why}")
            more = [*key[0], *([f"{parts} parts"] if parts > 1 else [])]
            say(f"  {self.name}: profile{''.join(f' + {name}' for name in more)}")
            found = memfit.profile(
                part_of(self._workload, parts),
                executor=self.arguments.executor,
                accumulate=parts,
                setup=self._setup(key[0]),
            )
            self._profiles[key] = replace(found, split=parts)
        return self._profiles[key]

    def _setup(self, techniques: Sequence[str]) -> Setup | None:
        assert self._workload is not None
        at_work = [name for name in techniques if name != MICROBATCH]
        if not at_work:
            return None
        tile_bytes = TILE_BYTES[self._workload.device.type]
        return setup_of(at_work, self._workload, self._profile(()), tile_bytes)


def _in_parts(workload: Workload, planned: Applied, profile: Profile) -> Inside:
    """The step that a fit with such a plan has: parts of the batch, their gradients added up."""

    def replan(larger: Workload) -> Fitted:
        raise AssertionError(f"the batch {larger.batch} is the one that was planned for")

    batch = workload.batch
    nothing: Any = None  # no result: it was not verified
    part = part_of(workload, planned.plan.split)
    fitted = Fitted(part, planned, profile, nothing, replan, whole=batch)
    return Inside(lambda: planned, lambda: fitted.step(batch))


def sets_of(techniques: Sequence[str]) -> list[list[str]]:
    """All sets of them with one way to keep the optimizer's state, those with few first."""
    sets = [list(c) for n in range(len(techniques) + 1) for c in combinations(techniques, n)]
    return [s for s in sets if len({*s} & {*STATE}) <= 1]


def sets_with_int8(techniques: Sequence[str]) -> list[list[str]]:
    """Nothing, int8 weights by themselves, with one other technique, with as many as can be."""
    sets = sets_of(techniques)
    most = max(map(len, sets))
    return [[], *([*s, INT8] for s in sets if len(s) in (0, 1, most))]


def tables(arguments: argparse.Namespace) -> Iterator[tuple[str, Measured, list[list[str]]]]:
    """What to measure of each workload, and of the one that has frozen weights for int8."""
    chosen = EVERY if ALL in arguments.techniques else arguments.techniques
    others = [name for name in chosen if name != INT8]
    for name in arguments.only:
        key = f"{name}, {arguments.executor}"
        if others or INT8 not in chosen:
            yield key, Measured(name, arguments), sets_of(others)
        if INT8 in chosen:
            measured = Measured(name, arguments, frozen=True)
            yield f"{key}, {FROZEN}", measured, sets_with_int8(others)


def units(arguments: argparse.Namespace, report: Report) -> Iterator[Unit]:
    """Every combination; those with few techniques first."""
    longer = COMPILED if arguments.executor == "inductor" else 1.0
    for key, measured, sets in tables(arguments):
        rows = report["workloads"].setdefault(key, {"rows": {}})["rows"]
        more_s, seconds = WORKLOADS[measured.name]
        for techniques in sets:
            for activations in arguments.activations:
                words = [*([activations] if activations != "kept" else []), *techniques]
                label = " + ".join(words) or PLAIN
                run = partial(measured.measure, activations, techniques)
                yield Unit(rows, label, run, f"{key}: {label}", longer * (more_s + seconds))
                more_s = 0
        measured.close()


def markdown(report: Report) -> str:
    """One table for each workload, the lowest peak last."""
    lines = heading("Combinations of techniques", report)
    for name, found in report["workloads"].items():
        lines += [f"## {name}", ""]
        lines += [
            "| techniques | peak | of plain | reserved | step | / plain | A/A |",
            "|---|---|---|---|---|---|---|",
        ]
        rows = {k: r for k, r in found["rows"].items() if "step_s" in r}
        for key, row in sorted(rows.items(), key=lambda item: -item[1]["peak_bytes"]):
            plain = row["plain"]
            ratio, a_a = f"{row['step_s'] / plain['step_s']:.3f}", f"{row['a_a']:.1%}"
            if row.get("by_rounds"):
                ratio, a_a = compared_text(row["by_rounds"]), compared_text(row["a_a_by_rounds"])
            lines.append(
                f"| {key} | {_megabytes(row['peak_bytes'])} "
                f"| {row['peak_bytes'] / plain['peak_bytes']:.0%} "
                f"| {_megabytes(row['reserved_bytes'])} "
                f"| {row['step_s'] * 1e3:.1f} ms ± {row['spread_s'] * 1e3:.1f} "
                f"| {ratio} | {a_a} |"
            )
        lines += [f"- {k}: {r['error']}" for k, r in found["rows"].items() if "error" in r]
        lines.append("")
    return "\n".join(lines) + "\n"


def _megabytes(size: int) -> str:
    return f"{size / MIB:.{0 if size >= 1000 * MIB else 1}f} MB"


def main() -> None:
    """Run what is missing and print the table."""
    parser = parser_of(__doc__, "combinations.json", WORKLOADS)
    parser.set_defaults(only=list(WORKLOADS)[:1])
    parser.add_argument("--executor", default="module", choices=("module", "graph", "inductor"))
    parser.add_argument(
        "--techniques",
        nargs="*",
        choices=[*EVERY, ALL],
        default=USUAL,
        metavar="NAME",
        help=", ".join([*EVERY, ALL]),
    )
    parser.add_argument(
        "--activations", nargs="+", choices=list(ACTIVATIONS), default=list(ACTIVATIONS)
    )
    arguments = parser.parse_args()
    report = open_report(arguments, "workloads")
    if device_here().type == "cpu":
        report.setdefault("note", ON_CPU)
    run_units(arguments, report, units(arguments, report), markdown)


if __name__ == "__main__":
    main()
