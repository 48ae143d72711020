"""Compile what a system needs for a workload, into the cache that later runs share, and end.

PYTHONPATH=src python3 benchmarks/ahead.py resnet50@64 compile:0.5
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from common import same_precision, say, tidy
from workloads import WORKLOADS, build

from memfit.bench.systems.catalogue import check_system, prepare
from memfit.bench.systems.prepared import Setting

STEPS = 2  # the second finds what the first one left to be compiled
# Others that compile hold memory, too, until they end.
TRIES, PATIENCE_S = 20, 5.0


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
        _patiently(prepared.step)
    seconds = time.monotonic() - begun
    say(f"{arguments.workload}, {arguments.system}: compiled in {seconds:.0f} s")


def _patiently(step: Callable[[], Any]) -> None:
    """Run a step as soon as there is room for it; what it has compiled is not lost meanwhile."""
    for _ in range(TRIES):
        with suppress(torch.OutOfMemoryError):
            step()
            return
        tidy()
        time.sleep(PATIENCE_S)
    step()


if __name__ == "__main__":
    main()
