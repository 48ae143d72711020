"""A report as flame graphs of bytes by module, for speedscope (speedscope.app).

The form is that of https://github.com/jlfwong/speedscope/blob/main/src/lib/file-format-spec.ts.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from memfit.ir.replay import LiveTensor, Replay
from memfit.report.run_report import RunReport

SCHEMA = "https://www.speedscope.app/file-format-schema.json"
Frame = tuple[str, str, int]  # name, file and line; no file: ""


def speedscope_json(report: RunReport) -> dict[str, Any]:
    """What is alive at the peak, before and after: modules hold modules, and these tensors."""
    frames: dict[Frame, int] = {}
    profiles = [
        _profile(f"{name}: peak in {replay.place(replay.peak_position)}", replay, frames)
        for name, replay in (("before", report.before), ("after", report.after))
    ]
    return {
        "$schema": SCHEMA,
        "name": f"{report.name}: bytes at the peak, by module",
        "exporter": f"memfit {report.memfit}",
        "activeProfileIndex": 0,
        "shared": {"frames": [_frame(frame) for frame in frames]},
        "profiles": profiles,
    }


def _profile(name: str, replay: Replay, frames: dict[Frame, int]) -> dict[str, Any]:
    weights: dict[tuple[int, ...], int] = {}
    for tensor in replay.alive(replay.peak_position):
        stack = tuple(frames.setdefault(frame, len(frames)) for frame in _stack(tensor, replay))
        weights[stack] = weights.get(stack, 0) + tensor.bytes
    return {
        "type": "sampled",
        "name": name,
        "unit": "bytes",
        "startValue": 0,
        "endValue": sum(weights.values()),
        "samples": [list(stack) for stack in sorted(weights)],
        "weights": [weights[stack] for stack in sorted(weights)],
    }


def _stack(tensor: LiveTensor, replay: Replay) -> list[Frame]:
    """The modules around a tensor from the outside in, and the tensor."""
    name = tensor.name if not tensor.shape else f"{tensor.name} {tensor.shape}"
    leaf = (name, tensor.file, tensor.line)
    if tensor.module:
        paths = accumulate(tensor.module.split("."), lambda path, part: f"{path}.{part}")
        return [*((path, "", 0) for path in paths), leaf]
    always = tensor.end - tensor.start >= replay.length
    return [leaf] if always else [(replay.place(tensor.start), "", 0), leaf]


def _frame(frame: Frame) -> dict[str, Any]:
    name, file, line = frame
    return {"name": name, "file": file, "line": line} if file else {"name": name}
