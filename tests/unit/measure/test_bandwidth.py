"""Which device the speeds of copies are measured on."""

from __future__ import annotations

import pytest
import torch

from memfit.measure import bandwidth


@pytest.mark.parametrize(("device", "expected"), [("cuda:0", 0), ("cuda:1", 1), ("cuda", 1)])
def test_the_first_gpu_was_taken_for_the_current_one(
    device: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a model on cuda:0 were measured on cuda:1."""
    measured: list[torch.device] = []
    monkeypatch.setattr(bandwidth, "_device_rates", measured.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    bandwidth.copy_rates(torch.device(device))
    assert measured == [torch.device("cuda", expected)]
