"""The machine a benchmark runs on, and its GPU's clock, without a CUDA context in this process.

Cells have the device to themselves: what this process held on it, they would miss.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import memfit
from memfit.verify.deterministic import CUBLAS

LOCKED_MHZ = 1500  # a clock that most work can hold without reaching the power limit
FREE = "free"


def device_type(device: str | None) -> str:
    """Where the cells run: as asked, else on CUDA where there is one."""
    return (device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]


def machine_facts(device: str | None, clock: str) -> dict[str, str]:
    """Names and versions; the same on the same machine, or results are not put into one file."""
    kind = device_type(device)
    facts = {
        "device": kind,
        "name": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "memfit": memfit.__version__,
    }
    for package in ("transformers", "torchvision"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    if kind != "cuda":
        return facts | {"threads": str(torch.get_num_threads())}
    nvml = _nvml()
    if nvml is not None:
        facts["name"] = str(nvml.nvmlDeviceGetName(_handle(nvml, device)))
        facts["driver"] = str(nvml.nvmlSystemGetDriverVersion())
    # Left in the environment it makes every matrix product slower.
    return facts | {"clock": clock, "fp32": "tf32", CUBLAS: os.environ.get(CUBLAS) or "not set"}


@contextmanager
def held_clock(device: str | None) -> Iterator[str]:
    """Hold the GPU's clock while the cells run, where this process may; says what it is."""
    nvml = _nvml() if device_type(device) == "cuda" else None
    if nvml is None:
        yield FREE
        return
    handle = _handle(nvml, device)
    try:
        nvml.nvmlDeviceSetGpuLockedClocks(handle, LOCKED_MHZ, LOCKED_MHZ)
    except nvml.NVMLError:  # only some users may
        yield FREE
        return
    try:
        yield f"locked at {LOCKED_MHZ} MHz"
    finally:
        nvml.nvmlDeviceResetGpuLockedClocks(handle)


def _nvml() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # NVML is optional: any failure of it only means "not known"
        return None
    return pynvml


def _handle(nvml: Any, device: str | None) -> Any:
    """NVML's handle of a CUDA device; it counts all devices, torch only the visible ones."""
    index = int((device or "cuda").partition(":")[2] or 0)
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if index < len(visible):
        name = visible[index].strip()
        return (
            nvml.nvmlDeviceGetHandleByIndex(int(name))
            if name.isdigit()
            else nvml.nvmlDeviceGetHandleByUUID(name)
        )
    return nvml.nvmlDeviceGetHandleByIndex(index)
