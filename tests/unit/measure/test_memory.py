"""Static bytes and measured peaks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memfit.measure.device import device_facts
from memfit.measure.memory import measure_peak, memory_cap, static_bytes
from memfit.measure.step import run_step
from memfit.workload import Workload


def test_tied_weights_count_once() -> None:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    workload = Workload(
        model,
        lambda m, b: m(b).sum(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.zeros(2, 8),
    )
    sizes = static_bytes(workload)
    assert sizes == {"parameters": 256, "optimizer_state": 0, "buffers": 0, "batch": 64}


def test_views_and_shared_storages_count_once_in_the_first_category() -> None:
    model = nn.Linear(8, 8, bias=False)
    model.register_buffer("view", model.weight.detach()[:2])
    base = torch.zeros(4, 8)
    workload = Workload(
        model,
        lambda m, b: m(b["x"]).sum(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        {"x": base, "again": base[1:], "n": 3},
    )
    sizes = static_bytes(workload)
    assert (sizes["parameters"], sizes["buffers"], sizes["batch"]) == (256, 0, 128)


def test_optimizer_state_is_counted_once_it_is_there(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    assert static_bytes(workload)["optimizer_state"] == 0
    run_step(workload)
    weights = static_bytes(workload)["parameters"]
    state = static_bytes(workload)["optimizer_state"]
    assert 2 * weights <= state <= 2.1 * weights


def test_measured_peak_is_static_bytes_and_the_highest_on_top(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    static = sum(static_bytes(workload).values())

    def work() -> None:
        for _ in range(3):
            x = torch.empty(2**20, dtype=torch.uint8)
            del x

    peak = measure_peak(workload, work)
    assert peak.bytes == pytest.approx(static + 2**20, abs=64)
    assert (peak.reserved_bytes, peak.retries) == (peak.bytes, 0)


def test_a_cap_on_the_cpu_is_nothing() -> None:
    with memory_cap(torch.device("cpu"), 1):
        torch.empty(100)


def test_facts_of_the_cpu() -> None:
    facts = device_facts(torch.device("cpu"))
    assert facts.type == "cpu"
    assert 0 < facts.free_bytes <= facts.capacity_bytes
    assert facts.torch == torch.__version__
