"""Profiles of steps that are launched as CUDA graphs, with a stand-in for CUDA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture import profile as profiling
from memfit.capture import seconds
from memfit.errors import UsageError
from memfit.ir.profile import AllocatorStart
from memfit.measure.memory import Peak
from memfit.runtime.cuda_graphs import CudaGraphs

MIB = 2**20


def _workload() -> memfit.Workload:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return memfit.Workload(model, lambda m, x: m(x).square().mean(), optimizer, torch.randn(8, 16))


def test_they_are_refused_where_there_is_no_cuda() -> None:
    with pytest.raises(UsageError, match="there are none on a cpu"):
        memfit.profile(_workload(), cuda_graphs=True)


def test_a_profile_says_why_there_are_none() -> None:
    profile = profiling.profile_workload(_workload(), executor="module", cuda_graphs=True)
    assert not profile.cuda_graphs
    assert "not launched as CUDA graphs: there are none on this device" in profile.notes
    assert not profiling.profile_workload(_workload(), executor="module").notes


@pytest.mark.parametrize(
    ("accumulate", "model_calls", "fits", "why"),
    [
        (2, 1, True, "after several batches"),
        (1, 2, True, "more than once"),
        (1, 1, False, "does not fit"),
        (1, 1, True, None),
    ],
)
def test_what_cannot_be_captured(
    accumulate: int, model_calls: int, fits: bool, why: str | None
) -> None:
    class Made(seconds.StepTimes):
        def __init__(self) -> None:
            self.accumulate = accumulate
            self.graph: Any = _Calls(model_calls)
            self.plain_peak = Peak(1, 1) if fits else None
            self.workload: Any = _OnCuda()

    found = Made()._why_no_graphs()
    assert found is None if why is None else why in str(found)


class _OnCuda:
    device = torch.device("cuda")


class _Calls:
    def __init__(self, model_calls: int) -> None:
        self.model_calls = model_calls


def test_what_lies_beside_the_graphs_is_there_from_start_to_end() -> None:
    graph = profiling.profile_workload(_workload(), executor="module").graph
    start = AllocatorStart(reserved_bytes=100 * MIB)
    plain, graphed = Peak(200 * MIB, 220 * MIB), Peak(230 * MIB, 260 * MIB)
    beside, allocator = profiling._beside_graphs(graph, start, plain, graphed)
    assert beside.fixed_bytes == graph.fixed_bytes + 30 * MIB
    assert allocator == replace(start, reserved_bytes=140 * MIB)
    same, _ = profiling._beside_graphs(graph, None, graphed, plain)
    assert same.fixed_bytes == graph.fixed_bytes


def test_the_host_does_not_count() -> None:
    times = object.__new__(seconds.StepTimes)
    times.passes, times.graphed_peak = 1, Peak(1, 1)
    whole = {"plain": 1.0, "half": 1.1, "recomputed": 1.2}
    device, host = [0.1, 0.1], [5.0, 5.0]
    step_s, factors = times._fit(whole, device, host, [0, 1])
    assert step_s == 1.0
    assert factors.device == pytest.approx(1.0)
    assert factors.host * sum(host) - factors.slack_s <= 0
    times.graphed_peak = None
    _, factors = times._fit(whole, device, host, [0, 1])
    assert factors.slack_s < sum(host)


def test_graphs_of_a_step_are_made_anew_for_each_way_to_run_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released: list[int] = []
    monkeypatch.setattr(CudaGraphs, "release", lambda self: released.append(1))
    monkeypatch.setattr(
        seconds.StepTimes, "_peak_of_graphs", lambda self: replace(self.plain_peak, bytes=7)
    )
    profile = profiling.profile_workload(_workload(), executor="module", cuda_graphs=True)
    assert profile.cuda_graphs
    assert len(released) == 3  # before the plain step, before the recomputed one, after it
    assert profile.baseline is not None and profile.baseline.peak_bytes == 7
