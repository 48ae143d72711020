"""torch.autograd.graph.save_on_cpu: everything that autograd saves goes to the host and back."""

from __future__ import annotations

import torch

from memfit.bench.systems.prepared import Prepared, Setting, Unavailable, around


def prepare(setting: Setting, family: str, argument: str) -> Prepared:
    """The step with its saved tensors in pinned host memory."""
    if setting.workload.device.type != "cuda":
        raise Unavailable("the step runs in host memory already: nothing to move it from")
    return around(setting.workload, lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))
