"""Changes to a model or an optimizer that can be taken back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Self


class Reversible(ABC):
    """A change that goes to work and is taken back; a context manager, at work within its block.

    Entered when it is at work already, it is taken back all the same when the block is left.
    """

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
        return self if self.at_work else self.install()

    def __exit__(self, *_: object) -> None:
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
        assert self._stack is None, f"{type(self).__name__} is at work already"
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
