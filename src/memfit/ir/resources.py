"""What a training run takes of a machine, before a plan and with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from memfit.ir.codec import to_data

How = Literal["measured", "projected", "not measured"]
Unit = Literal["bytes", "seconds", "samples/s"]


@dataclass(frozen=True)
class Amount:
    """A number and how it is known; None where nobody measured it, with the reason."""

    value: float | None
    how: How
    why: str | None = None


@dataclass(frozen=True)
class Resource:
    """One thing a run takes, without the plan and with it."""

    name: str
    unit: Unit
    before: Amount
    after: Amount

    @property
    def change(self) -> float | None:
        """With the plan over without it, less one; None where one of them is not known."""
        if not self.before.value or self.after.value is None:
            return None
        return self.after.value / self.before.value - 1


@dataclass(frozen=True)
class Resources:
    """All of them, for a run of `epochs` over `samples`, and the verdict of the fit behind them."""

    workload: dict[str, str]
    device: dict[str, Any]
    budget_bytes: int
    samples: int | None
    epochs: int | None
    verdict: str
    rows: tuple[Resource, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that `memfit resources --json` prints."""
        data: dict[str, Any] = to_data(self)
        for row, resource in zip(data["rows"], self.rows, strict=True):
            row["change"] = resource.change
        return data
