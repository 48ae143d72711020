"""A report as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: trace-event JSON.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU says what it means.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memfit.ir.replay import TRACKS, Replay
from memfit.report.run_report import RunReport

MOST_COUNTERS = 3000
Event = dict[str, Any]


def trace_json(report: RunReport) -> dict[str, Any]:
    """The step before and after as two processes with a track each for compute and both copies."""
    events = [
        event
        for pid, name, replay in (
            (1, f"before: {report.before_words}", report.before),
            (2, f"after: {report.after_words}", report.after),
        )
        for event in _process(pid, name, replay)
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "workload": report.name,
            "device": report.profile.device.name,
            "memfit": report.memfit,
            "command": report.command,
            "simulated": "seconds of calls and copies were measured, their order is simulated",
        },
    }


def _process(pid: int, name: str, replay: Replay) -> Iterator[Event]:
    yield _named("process_name", pid, 0, name)
    for tid, track in enumerate(TRACKS, start=1):
        yield _named("thread_name", pid, tid, track)
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": pid,
            "tid": tid,
            "args": {"sort_index": tid},
        }
    for work in sorted(replay.work, key=lambda w: w.start_s):
        yield {
            "ph": "X",
            "name": work.name if work.kind == "other" else f"{work.kind} {work.name}",
            "cat": work.kind,
            "pid": pid,
            "tid": 1 + TRACKS.index(work.track),
            "ts": work.start_s * 1e6,
            "dur": (work.end_s - work.start_s) * 1e6,
            "args": {"bytes": work.bytes} if work.bytes else {},
        }
    for position in replay.sampled(MOST_COUNTERS):
        yield {
            "ph": "C",
            "name": "memory (bytes)",
            "pid": pid,
            "ts": replay.times[position] * 1e6,
            "args": {name: sizes[position] for name, sizes in replay.curves.items()},
        }


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
