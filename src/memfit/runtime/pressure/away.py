"""The storages that lie in host memory, in the order they were saved."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from weakref import ref

from memfit.runtime.pressure.saved import Saved


class Away:
    """Knows storages by their number, without keeping them alive."""

    def __init__(self) -> None:
        self._references: dict[int, ref[Saved]] = {}
        self._numbers: list[int] = []  # rising

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, saved: Saved) -> None:
        """Take in a storage that left the device."""
        self._references[saved.number] = ref(saved)
        insort(self._numbers, saved.number)

    def remove(self, number: int) -> None:
        """Forget a storage."""
        del self._references[number]
        del self._numbers[bisect_left(self._numbers, number)]

    def before(self, number: int) -> Iterator[Saved]:
        """The storages saved before `number`, latest first; each may be removed when it comes."""
        while position := bisect_left(self._numbers, number):
            number = self._numbers[position - 1]
            saved = self._references[number]()
            if saved is not None:  # otherwise its remains wait to be put away
                yield saved

    def after(self, number: int) -> Iterator[Saved]:
        """The storages saved after `number`, in the order of saving; likewise."""
        while (position := bisect_right(self._numbers, number)) < len(self._numbers):
            number = self._numbers[position]
            saved = self._references[number]()
            if saved is not None:
                yield saved
