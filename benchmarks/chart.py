"""Draw memory against time from a report of inside.py: an SVG file beside it for each workload.

    PYTHONPATH=src python3 benchmarks/chart.py benchmarks/results/inside-h200.json

Stars are memfit's steps, and the line joins those of them that no other of them beats in both.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import MIB, say
from comparing.comparison import MATCH, UNPLANNED

from memfit.bench.report.charts import Point, memory_and_time

SLOWEST = 2.5  # times the fastest step: what takes longer would press the rest together


def points_of(systems: dict[str, dict[str, Any]]) -> list[Point]:
    """The systems that have a peak and a time, from the least memory up."""
    found = [
        Point(_label(name), row["peak_bytes"] / MIB, 1e3 * row["step_s"], name.startswith("memfit"))
        for name, row in systems.items()
        if "peak_bytes" in row and "step_s" in row
    ]
    limit = SLOWEST * min((point.time for point in found), default=0.0)
    return sorted((p for p in found if p.time <= limit), key=lambda point: point.peak_mb)


def front_of(points: list[Point]) -> list[tuple[float, float]]:
    """Of memfit's points, from the least memory up, those that take less time than all before."""
    front: list[tuple[float, float]] = []
    for point in points:
        if point.own and (not front or point.time < front[-1][1]):
            front.append((point.peak_mb, point.time))
    return front


def _label(name: str) -> str:
    if name.startswith(MATCH):
        return ""  # one for every peer: they would stand on top of each other
    if name.startswith("memfit"):
        own, with_, _ = name.replace(UNPLANNED, "memfit nothing planned").partition(" with ")
        return own.removeprefix("memfit ") + (", set up" if with_ else "")
    names = {"compile": "torch.compile", "blocks": "blocks compiled"}
    family, colon, budget = name.partition(":")
    return names.get(family, family) + (f", budget {budget}" if colon else "")


def main() -> None:
    """Draw the workloads of the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    for file in parser.parse_args().files:
        report = json.loads(file.read_text())
        for name, rows in report["workloads"].items():
            points = points_of(rows["systems"]) if "error" not in rows["systems"] else []
            if not points:
                say(f"{file.name}: {name} has no systems with a peak and a time")
                continue
            title = f"{name} on {report['machine']['gpu']} (stars: memfit)"
            left = len(rows["systems"]) - len(points)
            svg = memory_and_time(title, points, front_of(points), "step, ms")
            short = name.translate(str.maketrans({" ": "-", "@": "-", ",": None}))
            path = file.with_name(f"{file.stem}-{short}.svg")
            path.write_text(svg + "\n")
            say(f"{path}: {len(points)} systems, {left} without a time or too slow to be shown")


if __name__ == "__main__":
    main()
