"""Numbers that modules keep for themselves: a forward that is run again must see the same ones, and
leave them as the first one did.

Only plain attributes count (`self.calls += 1`), not those in lists or dictionaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

Place = tuple[torch.nn.Module, str]
Numbers = Mapping[Place, int | float]


def numbers_of(module: torch.nn.Module) -> dict[Place, int | float]:
    """Every attribute that is a number, of a module and of those in it."""
    return {
        (owner, name): value
        for owner in module.modules()
        for name, value in vars(owner).items()
        if type(value) in (int, float)  # a bool is a switch
    }


def numbers_at(places: Iterable[Place]) -> dict[Place, int | float]:
    """These numbers as they are now."""
    return {(owner, name): vars(owner)[name] for owner, name in places if name in vars(owner)}


def changed_since(before: Numbers) -> list[Place]:
    """The numbers that are others now."""
    return [
        (owner, name) for (owner, name), old in before.items() if vars(owner).get(name, old) != old
    ]


def put_back(numbers: Numbers) -> None:
    """Have these numbers again."""
    for (owner, name), value in numbers.items():
        if name in vars(owner) and vars(owner)[name] != value:
            vars(owner)[name] = value


@contextmanager
def as_they_were(numbers: Numbers) -> Iterator[None]:
    """Within the block the numbers are these; afterwards what they were before it."""
    now = numbers_at(numbers)
    put_back(numbers)
    try:
        yield
    finally:
        put_back(now)
