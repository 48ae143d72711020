"""What a compiled segment is to keep, and the ways in which that can fail."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.errors import MemfitError, PlanFileError


class CannotCapture(MemfitError):
    """A segment that cannot be run as one compiled graph; `reason` is one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class CannotCompile(CannotCapture):
    """A segment that was traced as one graph, and no code can be made for it on this machine."""

    exit_code = 3

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.hint = (
            "install what makes the code (a C++ compiler for a CPU, Triton for a GPU that it "
            "knows), or run the operators one by one: --executor graph (executor='graph')"
        )


class OtherGraph(PlanFileError):
    """A segment that runs other operators than those it was planned for."""


class OtherShape(MemfitError):
    """A shape for which a segment runs other operators: torch copies less when a size is 1."""


def no_graph(reason: CannotCapture) -> MemfitError:
    """The error of a segment that was planned as a graph and is none now, or has no code."""
    if isinstance(reason, CannotCompile):
        return reason
    return OtherGraph(
        f"the plan runs a segment as one graph, which cannot be had: {reason}",
        hint="the model or its inputs changed: make a new plan",
    )


@dataclass(frozen=True)
class Choice:
    """What a segment keeps: a set of names of one graph structure, or what is kept unplanned.

    `plain`: its operators run one by one, as they must to be timed. `symbolic`: one code for many
    shapes. `least`: everything is recomputed that can be, whatever the structure.
    """

    plain: bool
    structure: str | None = None
    saved: tuple[str, ...] | None = None
    symbolic: bool = False
    least: bool = False
