"""Observing a loop on a GPU: the allocator's own peaks, events that nobody waits for, low cost."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.measure.timing import Clock, Inside, Timing, summarise, time_interleaved
from memfit.observe import MemoryProfiler, component_times
from memfit.observe.components import BY_REPLAY, LAUNCHED
from memfit.observe.counters import CudaCounter, Reading, private_free_bytes

WIDTH, LAYERS, ROWS = 2048, 12, 8192
MIB = 2**20


@pytest.fixture
def device() -> Iterator[torch.device]:
    gc.collect()
    torch.cuda.empty_cache()
    yield torch.device("cuda", torch.cuda.current_device())
    gc.collect()
    torch.cuda.empty_cache()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(WIDTH, WIDTH), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.linear(x))


def build(device: torch.device) -> memfit.Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randn(ROWS, WIDTH, device=device)
    return memfit.Workload(model, lambda m, b: m(b).square().mean(), optimizer, batch)


def train(workload: memfit.Workload, memory: MemoryProfiler | None = None) -> None:
    """A step, with its phases if somebody looks."""
    if memory is None:
        workload.compute_loss().backward()
        workload.optimizer.step()
        workload.optimizer.zero_grad()
        return
    with memory.phase("forward"):
        loss = workload.compute_loss()
    with memory.phase("backward"):
        loss.backward()
    del loss
    with memory.phase("optimizer"):
        workload.optimizer.step()
        workload.optimizer.zero_grad()


def test_the_peak_is_the_allocator_s(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    workload = build(device)
    for _ in range(3):
        train(workload)
    torch.cuda.reset_peak_memory_stats(device)
    train(workload)
    expected = torch.cuda.max_memory_allocated(device)
    before = torch.cuda.memory_allocated(device)
    with MemoryProfiler() as memory:
        for _ in memory.steps(range(4)):
            train(workload, memory)
    assert memory.device == device
    assert {s.used_bytes for s in memory.series.step_peaks().values()} == {expected}
    assert memory.peak_phase == "backward"
    series = memory.series
    assert series.initial_bytes == series.final_bytes == before
    assert 0 <= (series.fragmentation or 0) < 1
    assert series.retries == 0
    assert series.capacity_bytes <= torch.cuda.get_device_properties(device).total_memory
    assert "allocated by torch" in memory.generate_report()


def test_a_tensor_that_comes_and_goes_is_seen_in_its_phase(device: torch.device) -> None:
    with MemoryProfiler() as memory:
        for step in range(3):
            with memory.step():
                with memory.phase("quiet"):
                    torch.empty(4 * MIB, dtype=torch.uint8, device=device)
                with memory.phase("loud"):
                    size = 600 if step == 2 else 100
                    torch.empty(size * MIB, dtype=torch.uint8, device=device)
    (spike,) = memory.identify_spikes(400)
    assert spike == (2, 500.0, "loud")
    statistics = memory.phase_statistics()
    base = memory.series.initial_bytes / MIB
    assert statistics["quiet"].max - base == 4
    assert statistics["loud"] == pytest.approx((base + 800 / 3, base + 600, base + 100))


def test_a_step_that_runs_out_of_memory_is_seen(device: torch.device) -> None:
    memory = MemoryProfiler()
    with pytest.raises(torch.OutOfMemoryError):
        with memory, memory.step(), memory.phase("forward"):
            kept = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
            torch.empty(2**50, dtype=torch.uint8, device=device)
    assert kept.numel() and memory.peak_phase == "forward"
    assert memory.peak_usage_bytes >= 256 * MIB


def test_seconds_of_phases_add_up_to_the_loop(device: torch.device) -> None:
    workload = build(device)
    for _ in range(3):
        train(workload)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    with MemoryProfiler() as memory:
        for _ in memory.steps(range(20)):
            train(workload, memory)
        torch.cuda.synchronize(device)
        wall = time.perf_counter() - start
    seconds = memory.series.phase_seconds()
    assert 20 * sum(seconds.values()) == pytest.approx(wall, rel=0.05)
    assert seconds["backward"] > seconds["forward"] > seconds["optimizer"] > 0


def test_the_readings_of_a_step_cost_the_host_less_than_a_hundredth_of_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reading is taken alone, of many: that needs no quiet machine, as two loops do."""
    workload = build(device)
    take, taken = CudaCounter.take, []

    def counted(counter: CudaCounter) -> Reading:
        taken.append(counter)
        return take(counter)

    monkeypatch.setattr(CudaCounter, "take", counted)
    with MemoryProfiler() as memory:
        for _ in memory.steps(range(10)):
            train(workload, memory)
    monkeypatch.undo()
    plain = time_interleaved({"plain": lambda: train(workload)}, device, rounds=20, warmup=3)

    counter, clock = CudaCounter(device), Clock(device)
    counter.open()
    rounds = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(100):
            counter.take()
            clock.now()  # the moment that goes with every reading
        rounds.append((time.perf_counter() - start) / 100)
    cost_s, step_s = min(rounds) * len(taken) / 10, plain["plain"].median_s
    told = f"{len(taken) / 10:g} readings of {min(rounds) * 1e6:.0f} us, {step_s * 1e3:.2f} ms"
    assert cost_s < 0.01 * step_s, told


def test_profiling_costs_less_than_a_hundredth(device: torch.device) -> None:
    workload = build(device)
    memories: list[MemoryProfiler] = []

    def profiled() -> None:
        for _ in memories[-1].steps(range(10)):
            train(workload, memories[-1])

    def plain() -> None:
        for _ in range(10):
            train(workload)

    def around() -> Any:
        memories.append(MemoryProfiler())
        return memories[-1]

    works = {"plain": plain, "profiled": Inside(around, profiled), "again": plain}
    times = time_interleaved(works, device, rounds=20, warmup=3)

    def beside_plain(name: str) -> Timing:
        rounds = zip(times[name].samples, times["plain"].samples, strict=True)
        return summarise([mine / plain for mine, plain in rounds])

    again = beside_plain("again")
    noise = max(abs(again.median_s - 1), again.spread_s)
    if noise > 0.01:
        pytest.skip(f"needs the GPU to itself: the same steps differ by {noise:.1%}")
    assert beside_plain("profiled").median_s - 1 < 0.01


def test_memory_of_cuda_graphs_is_told_at_the_end(device: torch.device) -> None:
    """Between launches the allocator counts it as free."""
    still, graph = torch.zeros(16 * MIB, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        still.add(1.0).mul(2.0).sum()
    with MemoryProfiler() as memory:
        for _ in memory.steps(range(3)):
            graph.replay()
    (note,) = memory.series.notes
    assert "not in these numbers" in note and private_free_bytes(device) >= 64 * MIB
    assert memory.peak_usage_bytes == memory.series.initial_bytes
    del graph


@pytest.mark.parametrize("executor", ["module", "graph"])
def test_components_of_plain_and_fitted_steps_add_up(device: torch.device, executor: str) -> None:
    workload = build(device)
    plain = component_times(workload, [workload.batch])
    assert plain.accounted_share == pytest.approx(1, abs=0.05)
    assert plain.components["recompute"] == 0
    assert len(plain.segments) == LAYERS + 1
    with memfit.fit_workload(workload, "70%", executor=executor, steps=3) as fitted:
        assert fitted.plan.techniques == ("recompute",), fitted.result.notes
        times = component_times(fitted, [workload.batch])
    assert times.accounted_share == pytest.approx(1, abs=0.05)
    assert times.components["recompute"] > 0
    if executor == "module":
        assert times.recompute == BY_REPLAY
        replayed = sum(s.recompute_s for s in times.segments if s.name)
        assert replayed == pytest.approx(times.components["recompute"], rel=0.01)


def test_a_step_launched_as_graphs_has_phases_and_no_segments(device: torch.device) -> None:
    workload = build(device)
    with memfit.fit_workload(workload, strategy="none", cuda_graphs=True, steps=3) as fitted:
        assert fitted.plan.cuda_graphs, fitted.result.notes
        times = component_times(fitted, [workload.batch], warmup=0)
    assert times.notes == (LAUNCHED,) and times.segments == ()
    assert times.accounted_share == pytest.approx(1, abs=0.05)
    assert all(times.components[name] > 0 for name in ("forward", "backward", "optimizer"))


def test_copies_are_timed_and_counted_in_flight(device: torch.device) -> None:
    workload = build(device)
    flying: list[int] = []
    fit = memfit.fit_workload(workload, strategy="swap", allow="+offload", steps=3)
    with fit as fitted:
        last = workload.model[LAYERS - 1]
        hook = last.register_forward_hook(lambda *_: flying.append(fitted.applied.copies_in_flight))
        times = component_times(fitted)
        hook.remove()
        torch.cuda.synchronize(device)
        assert fitted.applied.copies_in_flight == 0
    assert times.accounted_share == pytest.approx(1, abs=0.05)
    assert times.copies is not None and times.copies.out_bytes > 0
    assert times.copies.out_s > 0 and times.copies.back_s > 0
    assert max(flying) > 0
