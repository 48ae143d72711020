"""The CUDA allocator's settings. The only module that changes them."""

from __future__ import annotations

import os
import warnings

import torch

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def prefer_expandable_segments(device: torch.device) -> str | None:
    """Let the allocator grow one segment, unless the user chose settings; return what was done.

    Live bytes then take hardly more than themselves; without it a planned step can hold half as
    much again in pieces that fit nothing (measured in benchmarks/results).
    """
    if device.type != "cuda" or any(os.environ.get(name) for name in _VARIABLES):
        return None
    if torch.cuda.memory.get_allocator_backend() != "native":
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 2.11 calls the setter private, 2.13 renames it
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    return "CUDA allocator set to expandable_segments:True, which keeps reserved memory low"
