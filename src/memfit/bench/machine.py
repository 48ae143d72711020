"""The machine a benchmark runs on, without a CUDA context in this process.

Cells have the device to themselves: what this process held on it, they would miss. The device's
settings are left as they are: its clock moves with its power, so times are compared in turn.
"""

from __future__ import annotations

import hashlib
import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import memfit
from memfit.verify.deterministic import CUBLAS

FREE = "free"  # results from before clocks were left alone say what they were held at


@cache
def code_digest() -> str:
    """A name of the package's code as it lies on disk: results of other code are told by it."""
    digest = hashlib.sha256()
    folder = Path(memfit.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def device_type(device: str | None) -> str:
    """Where the cells run: as asked, else on CUDA where there is one."""
    return (device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]


def machine_facts(device: str | None) -> dict[str, str]:
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
    return facts | {"clock": FREE, "fp32": "tf32", CUBLAS: os.environ.get(CUBLAS) or "not set"}


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
