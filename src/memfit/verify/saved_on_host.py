"""A plain step whose activations have no room on the device, run with them in host memory."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from memfit.errors import HostMemoryError
from memfit.runtime.swap.host_memory import free_host_bytes
from memfit.units import format_bytes

_SHARE = 0.9  # of free host memory: the system kills a process that takes all of it

_Packed = tuple[torch.device, torch.Tensor]


def saved_on_host() -> AbstractContextManager[object]:
    """Within it saved tensors wait in host memory, as with torch's `save_on_cpu`.

    HostMemoryError where they are more than is free.
    """
    room = int(_SHARE * free_host_bytes())
    taken = 0

    def pack(tensor: torch.Tensor) -> _Packed:
        nonlocal taken
        taken += tensor.nbytes
        if taken > room:
            raise HostMemoryError(
                f"the plain step, whose numbers the plan's are compared with, has no room on the "
                f"device, and its activations take more than {format_bytes(room)} of host memory",
                hint="free host memory, or fit a smaller batch",
            )
        return tensor.device, tensor.cpu()

    def unpack(packed: _Packed) -> torch.Tensor:
        device, tensor = packed
        return tensor.to(device)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
