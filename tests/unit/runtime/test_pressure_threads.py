"""Forwards in other threads than the valve's: its hooks do not reach them, and it says so."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.runtime.pressure import attention, module_calls
from memfit.runtime.pressure.valve import Valve


@pytest.fixture(autouse=True)
def calls_are_as_they_were() -> Iterator[None]:
    call = nn.Module.__call__
    yield
    assert nn.Module.__call__ is call


def valve(threshold: float = 0.0, **options: Any) -> Valve:
    return memfit.pressure(
        threshold, device="cpu", min_tensor_bytes=1, host_budget="1GiB", **options
    )


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, name="worker")
    thread.start()
    thread.join()


def _step(net: nn.Module) -> None:
    net(torch.ones(2, 4)).sum().backward()


def test_a_forward_in_another_thread_was_silently_not_covered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = model()
    with caplog.at_level(logging.WARNING), valve() as forced:
        for _ in range(2):
            in_thread(lambda: _step(net))
    assert forced.statistics.swaps == 0
    (record,) = caplog.records
    assert "thread 'worker'" in record.getMessage()
    assert "hint: enter memfit.pressure in the thread that runs" in record.getMessage()


def test_a_valve_without_hooks_notices_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_LOOK_S", 0.0)
    net = model()
    with caplog.at_level(logging.WARNING), valve(0.9, capacity="1GiB") as idle:
        _step(net)
        assert idle._attention._calls._stop is None
        monkeypatch.setattr(idle._saved_tensors, "counts", False)
        _step(net)
        assert idle.dozes
        _step(net)
        assert not caplog.records
        in_thread(lambda: _step(net))
    assert len(caplog.records) == 1


def test_what_saves_nothing_in_other_threads_is_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = model()

    def evaluate() -> None:
        with torch.no_grad():
            net(torch.ones(2, 4))

    with caplog.at_level(logging.WARNING), valve():
        in_thread(evaluate)
        in_thread(lambda: nn.Sequential(nn.Flatten(), nn.Flatten())(torch.ones(2, 4)))
        loss = net(torch.ones(2, 4)).sum()
        in_thread(loss.backward)
    assert not caplog.records


def test_an_awake_valve_looks_at_calls_only_until_a_tensor_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[object] = []
    own = module_calls.ModuleCalls.start

    def start(self: Any, told: Any) -> bool:
        def counted(value: object) -> Any:
            seen.append(value)
            return told(value)

        return own(self, counted)

    monkeypatch.setattr(module_calls.ModuleCalls, "start", start)
    net = model()
    again = valve()
    for _ in range(3):
        with again:
            _step(net)
            _step(net)
    assert len(seen) <= 2, "the model and its first layer"
