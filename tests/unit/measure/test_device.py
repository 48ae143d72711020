"""What is known of the machine that a step is measured on."""

from __future__ import annotations

import platform

import torch

from memfit.measure.device import device_facts


def test_the_machine_around_the_device_is_told() -> None:
    facts = device_facts(torch.device("cpu"))
    assert facts.torch == torch.__version__ and 0 < facts.free_bytes <= facts.capacity_bytes
    assert facts.host.startswith(f"Python {platform.python_version()}, {platform.system()} ")
