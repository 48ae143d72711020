"""Plans inside segments beside torch.compile and checkpointing, all timed in turn in one process.

    PYTHONPATH=src python3 benchmarks/inside.py -o benchmarks/results/inside.json --match

Each workload is fitted at static + 80, 60, 50 and 40 % of (peak - static) of the unplanned step
(--shares; --of-peak is of the peak itself, --budgets in GB of 10^9 bytes, --smallest the least that
a plan can hold): run under the hard cap, numbers compared. With --setup, techniques of the loss and
the optimizer are at work at the --setup-budgets and --setup-shares (of the step without them). Then
every system is timed in turn, the first one twice (A/A); with --match also plans for the live peak
of every peer. Peers are systems of `memfit bench` that leave the model as it was; there, each has a
process of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from common import Report, Unit, open_report, parser_of, run_units
from comparing.comparison import Comparison
from comparing.tables import markdown

from memfit.bench.systems.catalogue import FAMILIES, check_system, split_name
from memfit.planning.techniques import STEP

SHARES = (0.8, 0.6, 0.5, 0.4)
PEERS = (
    "eager",
    "compile",
    "checkpoint",
    "checkpoint-compiled",
    "blocks",
    "blocks:0.5",
    "blocks:0.2",
    "blocks:0.05",
)
# Seconds on an H200 of the profile, of one fit and of all systems with their first steps; those of
# resnet152 and llama-1b are guesses.
WORKLOADS = {
    "resnet152@64": (40, 30, 90),
    "resnet50@64": (30, 25, 60),
    "llama-1b@2x2048 bf16": (45, 30, 120),
    "gpt2-large@8x1024 bf16": (35, 28, 120),
    "vit_b_16@64": (21, 15, 65),
    "encoder@256x128": (25, 18, 55),
}
MATCH = 1.6  # times as long for the systems
OTHERS = 0.3  # of these seconds by executors that compile nothing


def main() -> None:
    """Run what is missing and print the tables."""
    arguments = parse_arguments()
    report = open_report(arguments, "workloads")
    run_units(arguments, report, units(arguments, report), markdown)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """What to run."""
    parser = parser_of(__doc__, "inside.json", WORKLOADS)
    parser.add_argument("--executor", choices=("module", "graph", "inductor"))
    parser.add_argument("--shares", nargs="*", type=float, default=list(SHARES))
    parser.add_argument("--of-peak", nargs="*", type=float, default=[], metavar="SHARE")
    parser.add_argument("--budgets", nargs="*", type=float, default=[], metavar="GB")
    parser.add_argument("--setup", nargs="*", default=[], choices=STEP, metavar="TECHNIQUE")
    parser.add_argument("--setup-budgets", nargs="*", type=float, default=[], metavar="GB")
    parser.add_argument("--setup-shares", nargs="*", type=float, default=[], metavar="SHARE")
    parser.add_argument(
        "--smallest", action="store_true", help="the least that a plan can hold as a budget, too"
    )
    parser.add_argument("--peers", nargs="*", default=list(PEERS), metavar="SYSTEM")
    parser.add_argument("--fits-only", action="store_true", help="budgets, without the systems")
    parser.add_argument(
        "--cuda-graphs", action="store_true", help="memfit's steps are launched as CUDA graphs"
    )
    parser.add_argument("--match", action="store_true", help="plans at each peer's peak, too")
    arguments = parser.parse_args(words)
    for system in arguments.peers:
        family = FAMILIES[split_name(check_system(system))[0]]
        if family.own_model or system.startswith(("memfit", "largest")):
            parser.error(f"{system} is no peer that leaves the model as it was")
    return arguments


def units(arguments: argparse.Namespace, report: Report) -> Iterator[Unit]:
    """Of every workload its fits, then all systems at once."""
    for name in arguments.only:
        rows = report["workloads"].setdefault(name, {"fits": {}, "systems": {}})
        fast = 1.0 if arguments.executor in (None, "inductor") else OTHERS
        profile_s, fit_s, systems_s = (fast * seconds for seconds in WORKLOADS[name])
        comparison = Comparison(name, rows, arguments)
        for set_up in (False, True):
            more_s = (
                0.0 if (comparison.kept.set_up if set_up else comparison.kept.plain) else profile_s
            )
            for key in comparison.keys(set_up=set_up):
                if not comparison.can_go_on(key):
                    rows["fits"].pop(key, None)
                run = partial(comparison.fit, key, set_up=set_up)
                yield Unit(rows["fits"], key, run, f"{name}: {key}", more_s + fit_s)
                more_s = 0.0
        if not arguments.fits_only:
            seconds = systems_s * (MATCH if arguments.match else 1.0)
            yield Unit(rows, "systems", comparison.measure_systems, f"{name}: systems", seconds)
        comparison.close()


if __name__ == "__main__":
    main()
