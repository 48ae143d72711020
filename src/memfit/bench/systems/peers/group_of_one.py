"""A process group of this process alone, for systems that want one."""

from __future__ import annotations

import atexit
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist


def join_a_group_of_one(device: torch.device) -> None:
    """Join it by way of a file: a port may be taken, by a cell that runs beside this one."""
    folder = tempfile.TemporaryDirectory(prefix="memfit-bench-", ignore_cleanup_errors=True)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.FileStore(str(Path(folder.name) / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    atexit.register(folder.cleanup)
    atexit.register(dist.destroy_process_group)  # goes first
