"""Facts about the device a step runs on."""

from __future__ import annotations

import os
import platform

import psutil
import torch

from memfit.errors import UsageError
from memfit.ir.profile import DeviceFacts

# Matrix products on CUDA are several times slower where a size is no multiple of this.
PRODUCT_GRAIN = 8


def device_facts(device: torch.device) -> DeviceFacts:
    """Name, capacity and free memory of `device`, and the software around it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        properties = torch.cuda.get_device_properties(device)
        # What this process caches but does not use is free to it.
        cached = torch.cuda.memory_reserved(device)
        return DeviceFacts(
            type="cuda",
            name=properties.name,
            capacity_bytes=total,
            free_bytes=free + cached,
            torch=torch.__version__,
            driver=_driver(device),
            host=_host(),
        )
    if device.type == "cpu":
        memory = psutil.virtual_memory()
        return DeviceFacts(
            type="cpu",
            name=platform.processor() or platform.machine(),
            capacity_bytes=memory.total,
            free_bytes=memory.available,
            torch=torch.__version__,
            host=_host(),
        )
    raise UsageError(
        f"memfit does not know devices of type {device.type!r}",
        hint="it fits steps on cuda and cpu",
    )


def _host() -> str:
    python, system = platform.python_version(), f"{platform.system()} {platform.machine()}"
    return f"Python {python}, {system}, {os.cpu_count()} cores"


def _driver(device: torch.device) -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # NVML is optional: any failure of it only means "not known"
        return None
