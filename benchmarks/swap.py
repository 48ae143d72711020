"""Activations moved to the host: how fast, how hidden, where it pays, and the safety valve.

    PYTHONPATH=src python3 benchmarks/swap.py -o benchmarks/results/swap.json --only everything

Parts: the `valve`; a thousand steps that stay `flat`; only what `hides` is moved; `everything` is
moved, beside save_on_cpu; strategies at one budget where it `pays`; the same on other GPUs,
`simulated` from the profiles that `pays` leaves beside the output (no GPU needed, and only when it
is asked for).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import Report, Unit, open_report, parser_of, run_units
from swapping import everything, flat, hides, pays, simulated, valve
from swapping.session import LAYERS, Session
from swapping.tables import PARTS, markdown

WHOLE = ("resnet50@64", "resnet152@64", "vit_b_16@64", "gpt2-large@8x1024 bf16")
LONG = ("llama-1b@1x8192 bf16", "llama-160m@1x32768 bf16")
SHARES = (0.1, 0.4, 0.0)  # the most telling first
SIMULATED = "simulated"
# Seconds on an H200, measured for `everything` and `hides` by `module`, else reckoned from the
# steps' own and from earlier benchmarks' profiles: of the profile by `module`, what capturing adds,
# and of each part after it.
PROFILE_S = {
    "resnet50@64": (4, 20),
    "resnet152@64": (8, 30),
    "vit_b_16@64": (5, 20),
    "gpt2-large@8x1024 bf16": (22, 15),
    "llama-1b@1x8192 bf16": (25, 15),
    "llama-160m@1x32768 bf16": (15, 15),
}
EVERYTHING_S = {
    "resnet50@64": 45,
    "resnet152@64": 60,
    "vit_b_16@64": 35,
    "gpt2-large@8x1024 bf16": 180,
}
HIDES_S = {"resnet50@64": 10, "resnet152@64": 20, "vit_b_16@64": 5, "gpt2-large@8x1024 bf16": 70}
PAYS_S = {"llama-1b@1x8192 bf16": 130, "llama-160m@1x32768 bf16": 110}
INDUCTOR = 2.5  # times as long to profile and learn
MANY = 1.5  # times as long to plan for every layer by itself


def main() -> None:
    """Run what is missing and print the tables."""
    arguments = parse_arguments()
    report = open_report(arguments, *PARTS, elsewhere=arguments.only == [SIMULATED])
    session = Session(tiny=arguments.tiny, steps=arguments.steps)
    run_units(arguments, report, units(arguments, report, session), markdown)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """What to run."""
    parser = parser_of(__doc__, "swap.json", PARTS)
    parser.set_defaults(only=[part for part in PARTS if part != SIMULATED])
    parser.add_argument("--workloads", nargs="+", choices=[*WHOLE, *LONG], metavar="NAME")
    parser.add_argument(
        "--executors",
        nargs="+",
        choices=("module", LAYERS, "graph", "inductor"),
        help=f"module and graph, for `pays` graph alone; {LAYERS}: module, each layer by itself",
    )
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES), help="for `pays`")
    parser.add_argument("--lessons", type=int, default=1, help="runs to learn from, for `pays`")
    return parser.parse_args(words)


def units(arguments: argparse.Namespace, report: Report, session: Session) -> Iterator[Unit]:
    """All units that were asked for; those that share a profile follow each other."""
    only = arguments.only

    def unit(part: str, key: str, seconds: float, run: Any, *args: Any) -> Unit:
        work = session.running(run, *args)
        return Unit(report[part], key, work, f"{part}: {key}", seconds)

    if "valve" in only:
        yield unit("valve", "with plan", 35, valve.run_with_plan)
        for key, name in valve.BOUND.items():
            yield unit("valve", key, 50, valve.run_idle, name)
        for share in valve.CAPS:
            yield unit("valve", f"cap {share:.0%}", 6, valve.run_capped, share)
        yield unit("valve", "after", 4, valve.run_after)
    for kind in flat.KINDS if "flat" in only else ():
        yield unit("flat", kind, 60, flat.run, kind)
    for name in _chosen(WHOLE, arguments):
        for executor in arguments.executors or ("module", "graph"):
            profile_s = _profile_s(name, executor)
            for part, module, more in (
                ("hides", hides, HIDES_S),
                ("everything", everything, EVERYTHING_S),
            ):
                if part in only:
                    key = f"{name}, {executor}"
                    more_s = more[name] * (MANY if executor == LAYERS else 1.0)
                    yield unit(part, key, profile_s + more_s, module.run, name, executor)
                    profile_s = 0.0
    for name in _chosen(LONG, arguments) if "pays" in only else ():
        for executor in arguments.executors or ("graph",):
            profile_s = _profile_s(name, executor)
            for share in arguments.shares:
                keep = _profile_file(arguments.output, name, executor)
                key = f"{name}, {executor}, {share:.0%}"
                how = (name, executor, share, arguments.lessons, keep)
                yield unit("pays", key, profile_s + PAYS_S[name], pays.run, *how)
                profile_s = 0.0
    for key, row in report["pays"].items() if SIMULATED in only else ():
        name, executor, _ = key.split(", ")
        keep = _profile_file(arguments.output, name, executor)
        for card in simulated.CARDS if "error" not in row and keep.exists() else ():
            budgets = row["budget_bytes"], row["host_budget_bytes"]
            yield unit(SIMULATED, f"{key}, {card}", 60, simulated.run, keep, card, *budgets)


def _chosen(names: tuple[str, ...], arguments: argparse.Namespace) -> list[str]:
    return [n for n in names if arguments.workloads is None or n in arguments.workloads]


def _profile_s(name: str, executor: str) -> float:
    module_s, more_s = PROFILE_S[name]
    if executor in ("module", LAYERS):
        return module_s
    return (module_s + more_s) * (INDUCTOR if executor == "inductor" else 1.0)


def _profile_file(output: Path, name: str, executor: str) -> Path:
    word = name.split()[0].replace("@", "-")
    return output.with_name(f"{output.stem}-{word}-{executor}.profile.json.gz")


if __name__ == "__main__":
    main()
