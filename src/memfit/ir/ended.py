"""NoResult: a fit that was refused or ran out of memory, and how far it came."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memfit.ir.codec import to_data
from memfit.ir.result import SCHEMA_VERSION
from memfit.units import format_bytes

INFEASIBLE, OUT_OF_MEMORY = VERDICTS = ("infeasible", "out of memory")


@dataclass(frozen=True)
class Stage:
    """Something that was done before a plan was ready, and how long it took."""

    doing: str
    seconds: float


@dataclass(frozen=True)
class OutOfMemory:
    """Where a run found no memory, and what was live then.

    `place` is the phase of the step and the module, if it was in one. `kinds` are bytes on the
    device by what they are, `largest` are tensors in words. What Python cannot see is a kind of its
    own on CUDA and missing on a CPU.
    """

    stages: tuple[Stage, ...]
    place: str
    kinds: dict[str, int]
    largest: tuple[str, ...]
    capacity_bytes: int

    @property
    def doing(self) -> str:
        """What was being done when it ended."""
        return self.stages[-1].doing if self.stages else ""

    @property
    def live_bytes(self) -> int:
        """All that was live, as far as it is known."""
        return sum(self.kinds.values())

    @property
    def words(self) -> str:
        """All of it in a few sentences."""
        doing = f"while {self.doing}" if self.doing else ""
        where = ", ".join(filter(None, (doing, f"in {self.place}" if self.place else "")))
        kinds = [f"{format_bytes(size)} {kind}" for kind, size in self.kinds.items() if size]
        parts = [f"It ended {where}"] if where else []
        parts.append(f"Live then: {', '.join(kinds) or 'no tensors'}")
        parts += [f"Largest: {', '.join(self.largest)}"] if self.largest else []
        return ". ".join(parts)


@dataclass(frozen=True)
class NoResult:
    """What a fit leaves that came to no result: the error, and for a refused budget the least.

    `verdict` is "infeasible" or "out of memory"; `memory` is known of the latter.
    """

    verdict: str
    error: str
    hint: str | None
    exit_code: int
    budget_bytes: int | None = None
    minimum_feasible_bytes: int | None = None
    incompressible_bytes: dict[str, int] | None = None
    workload: dict[str, str] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    memory: OutOfMemory | None = None
    schema_version: int = SCHEMA_VERSION
    slowdown: float | None = None  # of the fastest plan, where only that is too much

    @property
    def name(self) -> str:
        """What was to be trained."""
        return self.workload.get("name", "a training step")

    @property
    def heading(self) -> str:
        """The verdict in words."""
        return "no plan holds the budget" if self.verdict == INFEASIBLE else self.verdict

    def to_json(self) -> dict[str, Any]:
        """The object that `memfit fit --json` prints of an error, with more beside it."""
        data: dict[str, Any] = to_data(self)
        return {"schema_version": data.pop("schema_version"), **data}
