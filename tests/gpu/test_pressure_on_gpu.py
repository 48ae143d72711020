"""The safety valve on a GPU: same numbers, less memory, steps that finish where they did not."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import memfit
from memfit.measure.memory import memory_cap
from memfit.runtime.pressure import module_calls
from memfit.runtime.pressure.innards import hooks_in_force

WIDTH, LAYERS = 1024, 16
ROWS = 32768  # an activation of 128 MiB
ACTIVATION = 4 * WIDTH * ROWS


@pytest.fixture
def device() -> Iterator[torch.device]:
    gc.collect()
    torch.cuda.empty_cache()
    yield torch.device("cuda", torch.cuda.current_device())
    gc.collect()
    torch.cuda.empty_cache()


def build(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(WIDTH, 1)).to(device)


def step(model: nn.Sequential, rows: int = ROWS) -> tuple[torch.Tensor, list[torch.Tensor]]:
    device = next(model.parameters()).device
    torch.manual_seed(1)
    loss = model(torch.randn(rows, WIDTH, device=device)).square().mean()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return loss.detach(), gradients


def peak(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_the_numbers_stay_and_the_peak_falls(device: torch.device, threshold: float) -> None:
    model = build(device)
    step(model)
    static = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    expected = step(model)
    plain = peak(device) - static
    capacity = static + 12 * ACTIVATION
    with memfit.pressure(threshold, capacity=capacity) as valve:
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(3):
            actual = step(model)
        swapped = peak(device) - static
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    done = valve.statistics
    assert done.swaps == done.retrievals > 0
    assert swapped < (0.4 if threshold == 0 else 0.6) * plain
    assert done.out.gb_per_s > 1


def test_with_memory_to_spare_nothing_moves(device: torch.device) -> None:
    model = build(device)
    with memfit.pressure(0.99) as valve:
        for _ in range(3):
            step(model)
    done = valve.statistics
    assert (done.swaps, done.moved_bytes, done.host_highest_bytes) == (0, 0, 0)
    assert done.highest_bytes > LAYERS * ACTIVATION


def test_a_loop_that_went_out_of_memory_finishes_and_swaps_stop_afterwards(
    device: torch.device,
) -> None:
    model = build(device)
    step(model, rows=64)
    cap = torch.cuda.memory_allocated(device) + 16 * ACTIVATION
    with memory_cap(device, cap):
        with pytest.raises(torch.OutOfMemoryError):
            step(model)
        gc.collect()
        torch.cuda.empty_cache()
        with memfit.pressure(0.8) as valve:
            for _ in range(5):
                step(model)
            swaps = valve.statistics.swaps
            assert swaps > 0
            for _ in range(5):
                step(model, rows=ROWS // 8)
            assert valve.statistics.swaps == swaps


@pytest.mark.parametrize("monitoring", [True, False])
def test_a_large_batch_after_small_ones_wakes_a_valve_that_dozes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, monitoring: bool
) -> None:
    if not monitoring:
        monkeypatch.setattr(module_calls, "_MONITORING", None)  # as in Python 3.11
    model = build(device)
    expected = step(model)
    gc.collect()
    cap = torch.cuda.memory_allocated(device) + 16 * ACTIVATION
    with memory_cap(device, cap):
        with memfit.pressure(0.8) as valve:
            for _ in range(3):
                step(model, rows=ROWS // 8)
            assert valve.dozes
            assert hooks_in_force() is None
            for _ in range(2):
                actual = step(model)
                torch.testing.assert_close(actual, expected, rtol=0, atol=0)
                assert not valve.dozes
            swaps = valve.statistics.swaps
            assert swaps == valve.statistics.retrievals > 0
            for _ in range(3):
                step(model, rows=ROWS // 8)
            assert valve.dozes
            assert valve.statistics.swaps == swaps
        assert hooks_in_force() is None


def test_an_exception_leaves_no_memory_behind(device: torch.device) -> None:
    model = build(device)
    step(model, rows=64)
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    with memfit.pressure(0) as valve:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                model(torch.randn(ROWS, WIDTH, device=device)) @ torch.ones(3, 3, device=device)
        gc.collect()
        assert torch.cuda.memory_allocated(device) < before + 2 * ACTIVATION
        step(model)
    gc.collect()
    assert valve.statistics.swaps > 0
    assert torch.cuda.memory_allocated(device) == before


def test_a_hundred_steps_are_flat(device: torch.device) -> None:
    model = build(device)
    seen = []
    with memfit.pressure(0) as valve:
        for _ in range(100):
            step(model, rows=ROWS // 8)
            seen.append((torch.cuda.memory_allocated(device), valve.statistics.host_highest_bytes))
    assert len(set(seen[2:])) == 1
