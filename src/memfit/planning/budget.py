"""What a budget means in bytes: "16GiB", an int, "60%" of the baseline peak, or "auto"."""

from __future__ import annotations

from memfit.errors import UsageError
from memfit.ir.profile import DeviceFacts, Profile
from memfit.planning.simulate import simulator_of
from memfit.units import format_bytes, parse_bytes

AUTO_SHARE = 0.97  # of the free device memory: "auto" leaves 3 % to everyone else
_FEW_BYTES = 256  # a bare number below is gigabytes whose unit was forgotten


def resolve_budget(budget: str | int, profile: Profile) -> int:
    """Return the budget in bytes, checked against the device."""
    if isinstance(budget, str) and budget.strip().lower() == "auto":
        return int(AUTO_SHARE * profile.device.free_bytes)
    if isinstance(budget, str) and budget.strip().endswith("%"):
        return round(_share(budget) * baseline_peak_bytes(profile))
    check_budget_text(budget, profile.device)
    return parse_bytes(budget)


def baseline_peak_bytes(profile: Profile) -> int:
    """The unplanned step's peak: measured, or simulated when it does not fit."""
    if profile.baseline is not None:
        return profile.baseline.peak_bytes
    return simulator_of(profile).peak_bytes([])


def check_budget_text(budget: str | int, device: DeviceFacts | None = None) -> None:
    """Raise UsageError for a budget that can mean nothing, before anything is measured."""
    if isinstance(budget, str):
        text = budget.strip()
        if text.lower() == "auto":
            return
        if text.endswith("%"):
            _share(text)
            return
    size = budget_bytes(budget)
    if device is not None and size > device.capacity_bytes:
        raise UsageError(
            f"the budget of {format_bytes(size)} is more than the "
            f"{format_bytes(device.capacity_bytes)} that {device.name} has",
            hint='budget "auto" takes what is free',
        )


def budget_bytes(budget: str | int) -> int:
    """The bytes that a budget names which is no share; refuses what can be none."""
    size = parse_bytes(budget)
    if size <= 0:
        raise UsageError(
            f"a budget of {size} bytes is not a budget",
            hint='give the bytes the whole step may use, for example "12GiB" or "60%"',
        )
    if isinstance(budget, str) and budget.strip().isdecimal() and size < _FEW_BYTES:
        raise UsageError(
            f"a budget of {size} bytes holds no training step",
            hint=f'"{size}GiB" and "{size}GB" are gigabytes',
        )
    return size


def _share(budget: str) -> float:
    text = budget.strip().removesuffix("%").strip()
    try:
        share = float(text) / 100
    except ValueError:
        raise UsageError(
            f"{budget!r} is not a share", hint='"60%" is 60 % of the unplanned step\'s peak'
        ) from None
    if not 0 < share < float("inf"):
        raise UsageError(
            f"a budget of {budget!r} is not a budget",
            hint='"60%" is 60 % of the unplanned step\'s peak',
        )
    return share
