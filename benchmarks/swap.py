"""Activations moved to the host: how fast, how hidden, where it pays, and the safety valve.

    PYTHONPATH=src python3 benchmarks/swap.py -o benchmarks/results/swap.json --only everything

Parts: `everything` is moved, beside save_on_cpu; only what `hides` is moved; strategies at one
budget where it `pays`; the same on other GPUs, `simulated` from the profiles that `pays` leaves
beside the output (no GPU needed); the `valve`; a thousand steps that stay `flat`. Finished units in
the output file are kept, so a run that was cut off goes on where it stopped; `--estimate` says how
long the rest takes, and `--time-limit` starts nothing that would not end in time.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import add_command, load_report, save_report, say
from swapping import everything, flat, hides, pays, simulated, valve
from swapping.session import LAYERS, Session
from swapping.tables import PARTS, markdown

WHOLE = ("resnet50@64", "resnet152@64", "vit_b_16@64", "gpt2-large@8x1024 bf16")
LONG = ("llama-1b@1x8192 bf16", "llama-160m@1x32768 bf16")
SHARES = (0.0, 0.4)
# Seconds on an H200, reckoned from the steps' own and from earlier benchmarks' profiles: of the
# profile by `module`, what capturing adds, and of each part after it.
PROFILE_S = {
    "resnet50@64": (4, 20),
    "resnet152@64": (8, 30),
    "vit_b_16@64": (5, 20),
    "gpt2-large@8x1024 bf16": (22, 15),
    "llama-1b@1x8192 bf16": (25, 15),
    "llama-160m@1x32768 bf16": (15, 15),
}
EVERYTHING_S = {
    "resnet50@64": 25,
    "resnet152@64": 50,
    "vit_b_16@64": 30,
    "gpt2-large@8x1024 bf16": 120,
}
HIDES_S = {"resnet50@64": 25, "resnet152@64": 45, "vit_b_16@64": 20, "gpt2-large@8x1024 bf16": 70}
PAYS_S = {"llama-1b@1x8192 bf16": 130, "llama-160m@1x32768 bf16": 110}
INDUCTOR = 2.5  # times as long to profile and learn


@dataclass(frozen=True)
class Unit:
    """One row of the report: where it stands, how to get it, and about how long that takes."""

    part: str
    key: str
    seconds: float
    run: Callable[[Session], dict[str, Any]]


def main() -> None:
    """Run what is missing and print the tables."""
    arguments = parse_arguments()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    report = load_report(arguments.output, *PARTS)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    session = Session(device, tiny=arguments.tiny, steps=arguments.steps)
    begun = time.monotonic()
    missing = [u for u in units(arguments, report) if _is_missing(report, u)]
    if arguments.estimate:
        for unit in missing:
            print(f"{unit.seconds:6.0f} s  {unit.part}: {unit.key}")
        print(f"{sum(unit.seconds for unit in missing):6.0f} s  in all")
        return
    if missing:
        add_command(report)
    for unit in missing:
        passed = time.monotonic() - begun
        if arguments.time_limit is not None and passed + unit.seconds > arguments.time_limit:
            say(f"{unit.part}: {unit.key} would take about {unit.seconds:.0f} s: left for later")
            continue
        say(f"{unit.part}: {unit.key} (about {unit.seconds:.0f} s; {passed:.0f} s so far)")
        report.setdefault(unit.part, {})[unit.key] = run_unit(unit, session)
        save_report(arguments.output, report, markdown(report))
    print(markdown({k: v for k, v in report.items() if k not in PARTS or k in arguments.only}))


def parse_arguments() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("swap.json"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--workloads", nargs="+", choices=[*WHOLE, *LONG], metavar="NAME")
    parser.add_argument(
        "--executors",
        nargs="+",
        choices=("module", LAYERS, "graph", "inductor"),
        help=f"module and graph, for `pays` graph alone; {LAYERS}: module, each layer by itself",
    )
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES), help="for `pays`")
    parser.add_argument("--lessons", type=int, default=1, help="runs to learn from, for `pays`")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--time-limit", type=float, metavar="SECONDS")
    parser.add_argument("--estimate", action="store_true", help="only say how long it takes")
    parser.add_argument("--tiny", action="store_true", help="models of a few layers, to try it out")
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    return arguments


def units(arguments: argparse.Namespace, report: dict[str, Any]) -> Iterator[Unit]:
    """All units that were asked for; those that share a profile follow each other."""
    only = arguments.only
    for name in _chosen(WHOLE, arguments):
        for executor in arguments.executors or ("module", "graph"):
            profile_s = _profile_s(name, executor)
            for part, module, more in (
                ("everything", everything, EVERYTHING_S),
                ("hides", hides, HIDES_S),
            ):
                if part in only:
                    work = _unit(module.run, name, executor)
                    yield Unit(part, f"{name}, {executor}", profile_s + more[name], work)
                    profile_s = 0.0
    for name in _chosen(LONG, arguments) if "pays" in only else ():
        for executor in arguments.executors or ("graph",):
            profile_s = _profile_s(name, executor)
            for share in arguments.shares:
                keep = _profile_file(arguments.output, name, executor)
                work = _unit(pays.run, name, executor, share, arguments.lessons, keep)
                key = f"{name}, {executor}, {share:.0%}"
                yield Unit("pays", key, profile_s + PAYS_S[name], work)
                profile_s = 0.0
    if "valve" in only:
        yield from valve_units()
    for kind in flat.KINDS if "flat" in only else ():
        yield Unit("flat", kind, 35 if "graph" in kind else 25, _unit(flat.run, kind))
    if "simulated" in only:
        yield from simulated_units(arguments, report)


def valve_units() -> Iterator[Unit]:
    """The four questions to the valve."""
    yield Unit("valve", "with plan", 35, valve.run_with_plan)
    yield Unit("valve", "idle", 5, valve.run_idle)
    for share in valve.CAPS:
        yield Unit("valve", f"cap {share:.0%}", 6, _unit(valve.run_capped, share))
    yield Unit("valve", "after", 4, valve.run_after)


def simulated_units(arguments: argparse.Namespace, report: dict[str, Any]) -> Iterator[Unit]:
    """Every budget that `pays` ran, on every card; none before it ran."""
    for key, row in report.get("pays", {}).items():
        name, executor, _ = key.split(", ")
        keep = _profile_file(arguments.output, name, executor)
        if "error" in row or not keep.exists():
            continue
        for card in simulated.CARDS:
            budget, host = row["budget_bytes"], row["host_budget_bytes"]
            work = _unit(_without_session, keep, card, budget, host)
            yield Unit("simulated", f"{key}, {card}", 60, work)


def run_unit(unit: Unit, session: Session) -> dict[str, Any]:
    """The unit's row, with its seconds; a failure is a row, too, and is tried again next time."""
    begun = time.monotonic()
    try:
        row = unit.run(session)
    except Exception as error:  # the other units are worth having all the same
        traceback.print_exc()
        row = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    if "error" in row:
        session.forget()  # outside of the except block what the failed unit held is free
    session.tidy()
    return {**row, "seconds": time.monotonic() - begun}


def _is_missing(report: dict[str, Any], unit: Unit) -> bool:
    row = report.get(unit.part, {}).get(unit.key)
    return row is None or "error" in row


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


def _unit(run: Callable[..., dict[str, Any]], *args: Any) -> Callable[[Session], dict[str, Any]]:
    return lambda session: run(session, *args)


def _without_session(_: Session, *args: Any) -> dict[str, Any]:
    return simulated.run(*args)


if __name__ == "__main__":
    main()
