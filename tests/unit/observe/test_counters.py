"""What counts memory: the kernel's peak of the process, live tensors, the CUDA allocator."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import UsageError
from memfit.measure.memory import measure_peak, static_bytes
from memfit.measure.step import run_first_steps, run_step
from memfit.observe import counters
from memfit.observe.counters import (
    CudaCounter,
    LiveCounter,
    Reading,
    ResidentCounter,
    counter_for,
)
from memfit.observe.memory import MemoryProfiler

CPU = torch.device("cpu")
MIB = 2**20
SLACK = 8 * MIB  # of resident pages: the C library and Python take and give some


def touched(megabytes: int) -> torch.Tensor:
    return torch.ones(megabytes * MIB // 4)


def test_readings_that_follow_one_another_add_up() -> None:
    first, second = Reading(50, 20, 60, 1), Reading(40, 30, 90, 2)
    assert first | second == Reading(50, 30, 90, 3)
    assert Reading(5, 5) | Reading(7, 6) == Reading(7, 6)


def test_resident_pages_have_a_peak_that_was_gone_before_anybody_looked() -> None:
    counter = ResidentCounter()
    start = counter.open()
    try:
        counter.take()
        tensor = touched(256)
        del tensor
        gone = counter.take()
        kept = touched(128)
        held = counter.take()
        quiet = counter.take()
        assert kept.numel()
    finally:
        counter.close()
    assert gone.highest_bytes - gone.final_bytes == pytest.approx(256 * MIB, abs=SLACK)
    assert held.final_bytes - gone.final_bytes == pytest.approx(128 * MIB, abs=SLACK)
    assert quiet.highest_bytes - quiet.final_bytes < SLACK
    assert start > 0


def test_what_the_process_may_take_is_more_than_it_has() -> None:
    counter = ResidentCounter()
    resident = counter.open()
    assert resident < counter.capacity_bytes()
    counter.close()
    counter.close()


def test_a_kernel_without_the_counter_is_an_error_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counters, "_RESET", "/proc/self/not-there")
    with pytest.raises(UsageError, match="peak of resident memory cannot be read") as caught:
        MemoryProfiler("cpu").start()
    assert 'counts="live"' in str(caught.value)
    monkeypatch.undo()
    MemoryProfiler("cpu").start().stop()  # nothing was left behind


def test_live_bytes_are_exact() -> None:
    before = torch.empty(10 * MIB, dtype=torch.uint8)
    counter = LiveCounter(CPU)
    start = counter.open()
    tensor = torch.empty(3 * MIB, dtype=torch.uint8)
    del tensor
    one = counter.take()
    del before
    kept = torch.empty(2 * MIB, dtype=torch.uint8)
    two = counter.take()
    del kept
    three = counter.take()
    counter.close()
    assert one == Reading(start + 3 * MIB, start)
    # Older memory counts until the end of the phase it dies in; that of the recording is exact.
    assert two == Reading(start + 2 * MIB, start - 8 * MIB)
    assert three == Reading(start - 8 * MIB, start - 10 * MIB)


def test_live_bytes_of_a_step_are_those_that_a_fit_measures(zoo: Any) -> None:
    workload = zoo.workload(lambda: zoo.Stack(blocks=6, width=64), lambda: zoo.sequences(64))
    run_first_steps(workload)
    peak = measure_peak(workload, lambda: run_step(workload))
    with MemoryProfiler("cpu", counts="live") as memory:
        with memory.step():
            loss = workload.compute_loss()
            with memory.phase("backward"):
                loss.backward()
            workload.optimizer.step()
            workload.optimizer.zero_grad()
    above = memory.peak_usage_bytes - memory.series.initial_bytes
    assert above == pytest.approx(peak.bytes - sum(static_bytes(workload).values()), rel=0.01)
    assert memory.peak_phase == "backward"


class FakeAllocator:
    """torch.cuda's counters, as nested numbers."""

    def __init__(self) -> None:
        self.current, self.peak, self.held, self.retries = 100, 500, 800, 3
        self.split = 80
        self.segments: list[dict[str, Any]] = []
        self.backend = "native"

    def numbers(self, device: torch.device) -> dict[str, Any]:
        return {
            "allocated_bytes": {"all": {"current": self.current, "peak": self.peak}},
            "reserved_bytes": {"all": {"current": self.held, "peak": self.held}},
            "inactive_split_bytes": {"all": {"current": self.split, "peak": self.held}},
            "num_alloc_retries": self.retries,
        }

    def reset(self, device: torch.device) -> None:
        self.peak = self.current


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    fake = FakeAllocator()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", fake.numbers)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", fake.reset)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: fake.segments)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: fake.backend)
    return fake


def test_cuda_peaks_are_the_allocator_s_since_the_reading_before(allocator: FakeAllocator) -> None:
    counter = CudaCounter(torch.device("cuda", 0))
    assert counter.open() == 100
    allocator.current, allocator.peak = 150, 700
    assert counter.take() == Reading(700, 150, 800, 0, 80)
    allocator.retries, allocator.split = 5, 0
    assert counter.take() == Reading(150, 150, 800, 2, 0)
    counter.close()


def segment(pool: tuple[int, int], total: int, used: int, device: int = 0) -> dict[str, Any]:
    """A piece of the allocator's memory, as torch tells of it."""
    sizes = {"total_size": total * MIB, "allocated_size": used * MIB}
    return {"device": device, "segment_pool_id": pool, **sizes}


def test_memory_of_cuda_graphs_was_in_no_peak(
    allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between launches it counts as free, and the peak of a launched step was that of no step."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(counters, "cuda_capacity", lambda device: 1000)
    with MemoryProfiler("cuda:0", times=False) as memory:
        memory.record_step(0)
        allocator.segments = [
            segment((0, 0), 500, 100),
            segment((0, 3), 40, 8),
            segment((0, 3), 20, 0),
            segment((1, 0), 4, 4),  # in use, and counted
            segment((0, 7), 999, 0, device=1),
        ]
        assert memory.series.notes == (), "it is looked for once, at the end"
    (note,) = memory.series.notes
    assert "not in these numbers: up to 52.00 MiB in private pools" in note
    assert note in " ".join(memory.generate_report().split())


def test_an_allocator_without_pools_is_not_asked_for_them(allocator: FakeAllocator) -> None:
    counter = CudaCounter(torch.device("cuda", 0))
    assert counter.left_out() is None
    allocator.segments = [segment((0, 3), 40, 8)]
    assert counter.left_out() is not None
    allocator.backend = "cudaMallocAsync"  # which has no snapshot
    assert counter.left_out() is None


def test_a_profiler_on_cuda_reads_events_when_the_device_has_passed_them(
    allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = SimpleNamespace(until=0, waits=0)
    made = iter(range(100))

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.number = next(made)

        def record(self) -> None: ...

        def query(self) -> bool:
            return self.number <= passed.until

        def synchronize(self) -> None:
            passed.until, passed.waits = self.number, passed.waits + 1

        def elapsed_time(self, later: Event) -> float:
            assert later.query(), "read before the device was there"
            return 1000.0 * (later.number - self.number)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(counters, "cuda_capacity", lambda device: 1000)
    monkeypatch.setattr(CudaCounter, "unread_s", 0.0)  # nothing takes any time here
    with MemoryProfiler() as memory:
        for _ in range(2):
            with memory.step(), memory.phase("forward"):
                allocator.current, allocator.peak = 150, 600
        assert passed.waits == 0, "nothing may wait while the loop runs"
    assert passed.waits == 1
    assert [(s.phase, s.used_bytes, s.seconds) for s in memory.snapshots] == [
        ("forward", 600, 1.0),
        ("other", 150, 2.0),
        ("forward", 600, 1.0),
        ("other", 150, 2.0),
    ]
    assert memory.series.device == "cuda:0" and memory.series.counts == "allocated"
    assert memory.series.unused_share == pytest.approx(0.25)
    assert memory.series.fragmentation == pytest.approx(0.1)
    report = memory.generate_report()
    assert "of which 25.0% the peak did not need" in report
    assert re.search(r"fragmentation +at most 10\.0%", report)


def test_what_is_counted_on_which_device() -> None:
    assert isinstance(counter_for(CPU, None), ResidentCounter)
    assert isinstance(counter_for(CPU, "live"), LiveCounter)
    assert isinstance(counter_for(torch.device("cuda", 0), None), CudaCounter)
    with pytest.raises(UsageError, match="'live' is not counted on cuda"):
        counter_for(torch.device("cuda", 0), "live")


def test_a_profiled_step_costs_less_than_a_hundredth_of_a_real_one() -> None:
    """The cost is taken alone, of many steps: the difference of two loops would be all noise."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    batch = torch.randn(4096, 512)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        model(batch).square().mean().backward()
        seconds.append(time.perf_counter() - start)
    with MemoryProfiler("cpu") as memory:
        rounds = []
        for _ in range(10):
            start = time.perf_counter()
            for _ in memory.steps(range(20)):
                for phase in ("forward", "backward", "optimizer"):
                    with memory.phase(phase):
                        pass
            rounds.append((time.perf_counter() - start) / 20)
    cost, step = min(rounds), sorted(seconds)[2]
    assert cost < 0.01 * step, f"{cost * 1e6:.0f} us of {step * 1e3:.1f} ms"


def test_a_profiler_loads_no_rich() -> None:
    program = (
        "import sys; from memfit.observe import MemoryProfiler; "
        "memory = MemoryProfiler('cpu').start(); memory.record_step(0); memory.stop(); "
        "memory.export_csv(); assert 'rich' not in sys.modules"
    )
    env = os.environ | {"PYTHONPATH": str(Path(memfit.__file__).parents[1])}
    run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
