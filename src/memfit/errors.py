"""Errors a user can cause: what happened with the numbers, why, and a hint that helps."""

from __future__ import annotations

from typing import Any


class MemfitError(Exception):
    """Base of every error memfit raises on purpose; carries the exit code of the command line."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class UsageError(MemfitError):
    """Wrong words: an option, a name or a value that means nothing here."""


class PlanFileError(MemfitError):
    """A plan that cannot be read or was made for something else."""


class ProfileFileError(MemfitError):
    """A profile that cannot be read, or has nothing in it."""


class RunFileError(MemfitError):
    """The result of a fit that cannot be read, or belongs to something else."""


class InfeasibleError(MemfitError):
    """No plan meets the goal; `minimum_bytes` is the smallest budget that one would meet.

    `incompressible_bytes` splits it: fixed, and on top of that in forward and in backward.
    With a `slowdown` the memory would do, but the fastest plan takes so many times the plain step.
    `learned` is the profile with all that was run before the answer was no, if anything was;
    `missed_bytes` by how much more than it was to take the last plan took that ran, `ran` what all
    of them took, in words.
    """

    exit_code = 1
    learned: Any = None
    missed_bytes: int | None = None
    ran: str = ""

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int | None = None,
        minimum_bytes: int | None = None,
        incompressible_bytes: dict[str, int] | None = None,
        slowdown: float | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.incompressible_bytes = incompressible_bytes
        self.slowdown = slowdown

    def saying(self, more: str) -> InfeasibleError:
        """The same with more words."""
        same = InfeasibleError(
            f"{self.message}{more}",
            budget_bytes=self.budget_bytes,
            minimum_bytes=self.minimum_bytes,
            incompressible_bytes=self.incompressible_bytes,
            slowdown=self.slowdown,
            hint=self.hint,
        )
        same.learned, same.missed_bytes, same.ran = self.learned, self.missed_bytes, self.ran
        return same


class ModelError(MemfitError):
    """The model cannot be run or trained as given."""

    exit_code = 3


class DeviceMemoryError(MemfitError):
    """The device ran out of memory where memfit could not avoid it.

    `ended` says how far a step came and what was live then, if one was run (an OutOfMemory of
    memfit.ir.ended); `learned` is the profile, where it was made before.
    """

    exit_code = 4
    ended: Any = None
    learned: Any = None


class HostMemoryError(MemfitError):
    """Host memory for swapping could not be had, or was too small."""

    exit_code = 4


class NumbersWarning(UserWarning):
    """A fitted step holds its budget, and its numbers are not those of the plain one."""
