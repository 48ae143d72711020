"""Every combination of techniques on one workload, measured: no percentages are multiplied.

    PYTHONPATH=src python3 benchmarks/combinations.py -o benchmarks/results/combinations.json

Activations kept, all recomputed or all moved to the host, with and without each technique of the
loss and the optimizer: peak, reserved bytes and seconds of each combination, each timed in turn
with the plain step twice. --techniques leaves some out: what one of them costs by itself is
`--techniques tiled_loss --activations kept`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, combinations
from typing import Any

from common import MIB, Report, Unit, heading, open_report, parser_of, run_units, say
from systems import System, a_a_spread, again, compared, compared_text, measure_systems
from workloads import build

import memfit
from memfit.ir.plan import Plan
from memfit.ir.profile import Profile
from memfit.planning.techniques import APPROXIMATE, ON_HOST, STEP
from memfit.runtime.apply import Applied
from memfit.whole_step import setup_of
from memfit.workload import Workload

TILE_BYTES = 2**28
USUAL = [name for name in STEP if name not in (*APPROXIMATE, "step_on_host")]
PLAIN = "plain"
ACTIVATIONS = {"kept": "none", "recompute": "all", "offload": "swap"}
# Seconds on an H200, not measured: of the profile by `module`, and of one combination.
WORKLOADS = {"gpt2@8x1024 bf16": (10, 10), "gpt2-large@8x1024 bf16": (22, 25)}
COMPILED = 2.0  # times as long by `inductor`


class Measured:
    """One workload with its profiles, one for each set of techniques when it captures."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name, self.arguments = name, arguments
        self._workload: Workload | None = None
        self._profiles: dict[tuple[str, ...], Profile] = {}

    def close(self) -> None:
        """Let go of the workload."""
        self._workload, self._profiles = None, {}

    def measure(self, activations: str, techniques: Sequence[str]) -> dict[str, Any]:
        """One combination beside the plain step of the same executor."""
        if self._workload is None:
            self._workload = build(self.name, tiny=self.arguments.tiny)
        workload = self._workload
        plain = self._plan("kept", ())
        systems = {PLAIN: System.of(Applied(plain, workload.model))}
        planned = Applied(
            self._plan(activations, techniques), workload.model, self._setup(techniques)
        )
        systems["it"] = System.of(planned)
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
        """By a captured step the head is one of the segments, unless tiles are in its place."""
        key = tuple(techniques) if self.arguments.executor != "module" else ()
        if key not in self._profiles:
            say(f"  {self.name}: profile{''.join(f' + {name}' for name in key)}")
            assert self._workload is not None
            self._profiles[key] = memfit.profile(
                self._workload, executor=self.arguments.executor, setup=self._setup(key)
            )
        return self._profiles[key]

    def _setup(self, techniques: Sequence[str]) -> Any:
        assert self._workload is not None
        if not techniques:
            return None
        return setup_of(techniques, self._workload, self._profile(()), TILE_BYTES)


def units(arguments: argparse.Namespace, report: Report) -> Iterator[Unit]:
    """Every combination; those with few techniques first."""
    for name in arguments.only:
        key = f"{name}, {arguments.executor}"
        rows = report["workloads"].setdefault(key, {"rows": {}})["rows"]
        measured = Measured(name, arguments)
        more_s, seconds = WORKLOADS[name]
        longer = COMPILED if arguments.executor == "inductor" else 1.0
        chosen = arguments.techniques
        sets = chain.from_iterable(combinations(chosen, n) for n in range(len(chosen) + 1))
        for techniques in sets:
            if {*ON_HOST} <= {*techniques}:  # two ways to do the same
                continue
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
                f"| {key} | {row['peak_bytes'] / MIB:.0f} MB "
                f"| {row['peak_bytes'] / plain['peak_bytes']:.0%} "
                f"| {row['reserved_bytes'] / MIB:.0f} MB "
                f"| {row['step_s'] * 1e3:.1f} ms ± {row['spread_s'] * 1e3:.1f} "
                f"| {ratio} | {a_a} |"
            )
        lines += [f"- {k}: {r['error']}" for k, r in found["rows"].items() if "error" in r]
        lines.append("")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing and print the table."""
    parser = parser_of(__doc__, "combinations.json", WORKLOADS)
    parser.set_defaults(only=list(WORKLOADS)[:1])
    parser.add_argument("--executor", default="module", choices=("module", "graph", "inductor"))
    named = [*USUAL, "step_on_host"]
    parser.add_argument("--techniques", nargs="*", choices=named, default=USUAL, metavar="NAME")
    parser.add_argument(
        "--activations", nargs="+", choices=list(ACTIVATIONS), default=list(ACTIVATIONS)
    )
    arguments = parser.parse_args()
    report = open_report(arguments, "workloads")
    run_units(arguments, report, units(arguments, report), markdown)


if __name__ == "__main__":
    main()
