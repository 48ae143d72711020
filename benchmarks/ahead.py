"""Compile what a system needs for a workload, into the cache that later runs share, and end.

PYTHONPATH=src python3 benchmarks/ahead.py resnet50@64 compile:0.5
"""

from __future__ import annotations

import argparse
import time

from common import same_precision, say
from workloads import WORKLOADS, build

from memfit.bench.systems.catalogue import check_system, prepare
from memfit.bench.systems.prepared import Setting

STEPS = 2  # the second finds what the first one left to be compiled


def main() -> None:
    """Run two steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("system")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    begun = time.monotonic()
    same_precision()
    workload = build(arguments.workload, tiny=arguments.tiny)
    prepared = prepare(check_system(arguments.system), Setting(workload, STEPS, say))
    for _ in range(STEPS):
        prepared.step()
    seconds = time.monotonic() - begun
    say(f"{arguments.workload}, {arguments.system}: compiled in {seconds:.0f} s")


if __name__ == "__main__":
    main()
