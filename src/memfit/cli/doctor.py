"""`memfit doctor`: the machine and the software, and what is missing."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.text import Text

from memfit.cli import options
from memfit.cli.session import Session, opened
from memfit.ir.codec import from_data
from memfit.ir.profile import CopyRates
from memfit.report.copies import rates_line
from memfit.report.terminal import columns, facts
from memfit.units import format_bytes

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "scipy",
    "rich",
    "typer",
    "jinja2",
    "psutil",
    "nvidia-ml-py",
)
# Package of an extra, and what needs it.
EXTRAS = {
    "transformers": ("targets transformers:NAME", "pip install 'memfit[hf]'"),
    "torchvision": ("targets torchvision:NAME", "pip install 'memfit[zoo]'"),
    "timm": ("targets timm:NAME", "pip install 'memfit[zoo]'"),
    "matplotlib": ("report --plots and the charts of bench", "pip install 'memfit[plots]'"),
}
_COPIES = {
    "pinned_to_device": "pinned host to device",
    "pinned_to_host": "device to pinned host",
    "both_to_device": "both at once, to device",
    "both_to_host": "both at once, to host",
    "pageable_to_device": "pageable host to device",
    "pageable_to_host": "device to pageable host",
}

_CUBLAS_IS_SET = (
    "CUBLAS_WORKSPACE_CONFIG is set, which torch reads anew at every matrix product on a GPU "
    "(some 0.05 ms of the host each time): unset it to train"
)


def doctor(as_json: options.Json = False, verbose: options.Verbose = False) -> None:
    """Show devices, versions and copy speeds, and what is missing."""
    with opened(as_json=as_json, verbose=verbose) as session:
        session.progress("loading torch")
        found = examine(session)
        if as_json:
            session.emit(found)
        else:
            _show(session, found)


def examine(session: Session) -> dict[str, Any]:
    """Everything the command reports, as plain data."""
    import torch

    from memfit import __version__
    from memfit.ir.codec import to_data
    from memfit.measure.bandwidth import host_copy_bandwidth
    from memfit.runtime.swap.rates import swap_rates

    session.progress("measuring copies within host memory")
    cpu = _device(torch.device("cpu"))
    cpu["copy_bytes_per_s"] = {"host_to_host": host_copy_bandwidth()}
    cpu["copy_rates"] = to_data(swap_rates(torch.device("cpu")))
    devices = [cpu]
    if torch.cuda.is_available():
        devices += [_cuda_device(session, i) for i in range(torch.cuda.device_count())]
    return {
        "memfit": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_threads": torch.get_num_threads(),
        "torch_cuda": torch.version.cuda,
        "devices": devices,
        "packages": {name: _version(name) for name in PACKAGES},
        "extras": {name: _version(name) for name in EXTRAS},
        "cublas_workspace_config": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "c_compiler": shutil.which(os.environ.get("CC") or "gcc") or shutil.which("clang"),
        "cxx_compiler": shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++"),
    }


def _device(device: Any) -> dict[str, Any]:
    from memfit.ir.codec import to_data
    from memfit.measure.device import device_facts

    return {"device": str(device), **to_data(device_facts(device))}


def _cuda_device(session: Session, index: int) -> dict[str, Any]:
    import torch

    from memfit.ir.codec import to_data
    from memfit.measure.bandwidth import DEVICE_BYTES, device_copy_bandwidth
    from memfit.runtime.swap.rates import swap_rates

    device = torch.device("cuda", index)
    found = _device(device)
    session.progress(f"measuring what plans reckon with on {device}")
    found["copy_rates"] = to_data(swap_rates(device))
    # Two buffers of this size must fit, or measuring would be the thing that fails.
    if found["free_bytes"] < 3 * DEVICE_BYTES:
        found["copy_bytes_per_s"] = None
        return found
    session.progress(f"measuring copies to and from {device}")
    found["copy_bytes_per_s"] = to_data(device_copy_bandwidth(device))
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _show(session: Session, found: dict[str, Any]) -> None:
    devices = columns("device", "name", "memory", "free", "driver", text=("device", "name"))
    copies = columns("copies", "way", "GB/s", text=("copies", "way"))
    for device in found["devices"]:
        devices.add_row(
            device["device"],
            device["name"],
            format_bytes(device["capacity_bytes"]),
            format_bytes(device["free_bytes"]),
            device["driver"] or "-",
        )
        speeds = device["copy_bytes_per_s"]
        if speeds is None:
            copies.add_row(device["device"], "too little free memory to measure", "-")
            continue
        for name, speed in speeds.items():
            way = _COPIES.get(name, "within host memory")
            copies.add_row(device["device"], way, f"{speed / 1e9:.1f}")
    session.show(devices, copies, facts([*_reckoned(found), *_software(found)]))
    if found["cublas_workspace_config"]:
        session.line(Text.assemble(("slow: ", "bold yellow"), _CUBLAS_IS_SET))
    missing = _missing(found)
    for line in missing:
        session.line(Text.assemble(("missing: ", "bold yellow"), line))
    session.line(f"{len(missing) or 'nothing'} missing; next: memfit fit encoder")


def _reckoned(found: dict[str, Any]) -> list[tuple[str, str | Text]]:
    """The copies that a plan on each device reckons with."""
    rates = {d["device"]: d["copy_rates"] for d in found["devices"]}
    return [
        (f"plans on {name}", rates_line(None if data is None else from_data(CopyRates, data)))
        for name, data in rates.items()
    ]


def _software(found: dict[str, Any]) -> list[tuple[str, str | Text]]:
    packages = found["packages"] | found["extras"]
    return [
        ("memfit", found["memfit"]),
        ("python", f"{found['python']} on {found['platform']}"),
        ("cuda of torch", found["torch_cuda"] or "none: this torch is built for the CPU"),
        ("cpu threads", str(found["cpu_threads"])),
        ("compilers", ", ".join(filter(None, (found["c_compiler"], found["cxx_compiler"]))) or "-"),
        *((name, installed) for name, installed in packages.items() if installed is not None),
    ]


def _missing(found: dict[str, Any]) -> list[str]:
    lines = [
        f"{name}, for {EXTRAS[name][0]}: {EXTRAS[name][1]}"
        for name, installed in found["extras"].items()
        if installed is None
    ]
    if not found["c_compiler"] or not found["cxx_compiler"]:
        lines.append("a C and C++ compiler, for compiled segments: install gcc and g++")
    return lines
