"""Which device is observed."""

from __future__ import annotations

import torch

from memfit.errors import UsageError


def resolve_device(device: torch.device | str | None) -> torch.device:
    """The device of this name; None: the current CUDA device if there is one, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{device!r} names no device", hint='"cuda" or "cpu"') from error
    if found.type not in ("cuda", "cpu"):
        raise UsageError(
            f"the memory of devices of type {found.type!r} cannot be observed",
            hint="memfit knows cuda and cpu",
        )
    if found.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            f"{found} was asked for, and torch finds no CUDA device here",
            hint='leave the device out, or say device="cpu"; memfit doctor shows what is there',
        )
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise UsageError(
            f"{found} was asked for, and there are {torch.cuda.device_count()} CUDA devices",
            hint="they are numbered from 0",
        )
    return torch.device("cuda", index)
