"""Plain steps that have no room on the device, with their activations in host memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memfit
from memfit.errors import HostMemoryError
from memfit.verify import numerics, saved_on_host
from memfit.verify.numerics import compare, unplanned_numbers
from memfit.verify.parts import why_parts_differ


@pytest.fixture
def workload(zoo: SimpleNamespace) -> memfit.Workload:
    made: memfit.Workload = zoo.workload(lambda: zoo.Stack(blocks=2), lambda: torch.randn(4, 6, 8))
    return made


@pytest.fixture
def no_room_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    run = numerics._numbers

    def on_host_only(*args: Any, on_host: bool = False) -> Any:
        if not on_host:
            raise torch.OutOfMemoryError
        return run(*args, on_host=True)

    monkeypatch.setattr(numerics, "_numbers", on_host_only)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_the_numbers_are_the_same(
    workload: memfit.Workload, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    plain, on_host = unplanned_numbers(workload, None)
    assert not on_host
    request.getfixturevalue("no_room_on_the_device")
    again, on_host = unplanned_numbers(workload, None)
    assert on_host and compare(plain, again).bitwise_vs_unplanned


def test_activations_beyond_host_memory_ended_the_process(
    workload: memfit.Workload, no_room_on_the_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system kills who takes all of it, so it is refused before."""
    monkeypatch.setattr(saved_on_host, "free_host_bytes", lambda: 1000)
    with pytest.raises(HostMemoryError, match="more than 900 B of host memory") as refused:
        unplanned_numbers(workload, None)
    assert refused.value.hint
    assert all(p.grad is None for p in workload.model.parameters())
    assert why_parts_differ(workload) is None, "whether parts differ is not known then"
