"""Numbers that modules keep for themselves: a forward that is run again must see the same ones, and
leave them as the first one did.

Only plain attributes count (`self.calls += 1`), not those in lists or dictionaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeGuard

import torch

Place = tuple[torch.nn.Module, str]
Numbers = Mapping[Place, int | float]


def numbers_of(module: torch.nn.Module) -> dict[Place, int | float]:
    """Every attribute that is a number, of a module and of those in it."""
    return numbers_at((owner, name) for owner in module.modules() for name in _names(owner))


def numbers_at(places: Iterable[Place]) -> dict[Place, int | float]:
    """Those of these attributes that are numbers now."""
    found = {(owner, name): getattr(owner, name, None) for owner, name in places}
    return {place: value for place, value in found.items() if _is_number(value)}


def changed_since(before: Numbers) -> list[Place]:
    """The numbers that are others now."""
    return [place for place, now in numbers_at(before).items() if now != before[place]]


def put_back(numbers: Numbers) -> None:
    """Have these numbers again."""
    for owner, name in changed_since(numbers):
        vars(owner)[name] = numbers[owner, name]


def _names(owner: torch.nn.Module) -> Iterator[str]:
    """Its own numbers, and those it has of its class until it changes them."""
    yield from (name for name, value in vars(owner).items() if _is_number(value))
    kind: Any = type(owner)  # mypy takes modules for unhashable
    yield from _names_of_class(kind)


@cache
def _names_of_class(kind: type) -> tuple[str, ...]:
    own = kind.__mro__[: kind.__mro__.index(torch.nn.Module)]
    return tuple(n for c in own for n, value in vars(c).items() if _is_number(value))


def _is_number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float)  # a bool is a switch


@contextmanager
def as_they_were(numbers: Numbers) -> Iterator[None]:
    """Within the block the numbers are these; afterwards what they were before it."""
    now = numbers_at(numbers)
    put_back(numbers)
    try:
        yield
    finally:
        put_back(now)
