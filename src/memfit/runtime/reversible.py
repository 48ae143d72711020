"""Changes to a model or an optimizer that can be taken back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Self

from memfit.errors import UsageError


class Reversible(ABC):
    """A change that goes to work and is taken back; a context manager, at work within its block.

    Entered when it is at work already, it is taken back all the same when the block is left. A
    block within its own block would take it back too early, and is refused.
    """

    _entered = False

    @property
    @abstractmethod
    def at_work(self) -> bool:
        """Whether the change is made now."""

    @abstractmethod
    def install(self) -> Self:
        """Make the change."""

    @abstractmethod
    def undo(self) -> None:
        """Take it back; harmless when done twice."""

    def __enter__(self) -> Self:
        if self._entered and self.at_work:
            raise _twice(self)
        if not self.at_work:
            self.install()
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self._entered = False
        self.undo()


class Stacked(Reversible):
    """A change made of others, which are taken back in the opposite order."""

    _stack: ExitStack | None = None

    @property
    def at_work(self) -> bool:
        """Whether the change is made now."""
        return self._stack is not None

    def install(self) -> Self:
        """Make the change."""
        if self._stack is not None:
            raise _twice(self)
        with ExitStack() as stack:
            self._make(stack)
            self._stack = stack.pop_all()
        return self

    def undo(self) -> None:
        """Take it back; harmless when done twice."""
        if self._stack is not None:
            stack, self._stack = self._stack, None
            stack.close()

    @abstractmethod
    def _make(self, stack: ExitStack) -> None:
        """Make the changes, and put on the stack what takes each back."""


def _twice(change: Reversible) -> UsageError:
    return UsageError(
        f"this {type(change).__name__} is at work already",
        hint="enter it once; it can be entered again when its block was left, or after undo()",
    )
