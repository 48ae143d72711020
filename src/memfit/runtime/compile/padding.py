"""Which matrix products inductor pads, decided once.

A product of odd sizes is slow on a GPU, and inductor may pad it. It times both when it compiles:
where they take about as long, the next process may decide otherwise, and run other operators than a
plan was made for; and to time them takes memory that a budget has not got. What was decided is kept
here by sizes, goes with profiles and plans, and holds from then on. This is the only module that
touches how inductor pads. Limits: sizes that are symbols are left to inductor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_decided: dict[str, bool] = {}


def decisions() -> dict[str, bool]:
    """All products that were padded, or not, so far."""
    return dict(_decided)


def remember(padded: Mapping[str, bool]) -> None:
    """Pad as another process decided."""
    _decided.update(padded)


@contextmanager
def decided_once() -> Iterator[None]:
    """Within the block inductor is asked about each product of the same sizes once."""
    from torch._inductor.fx_passes import pad_mm

    asked = getattr(pad_mm, "should_pad", None)  # not in all releases
    if asked is None:
        yield
        return
    pad_mm.should_pad = _remembering(asked)
    try:
        yield
    finally:
        pad_mm.should_pad = asked


def _remembering(ask: Callable[..., Any]) -> Callable[..., Any]:
    def should_pad(
        match: Any, mat1: torch.Tensor, mat2: torch.Tensor, op: Any, *more: Any, **options: Any
    ) -> Any:
        sizes = (*mat1.shape, *mat2.shape)
        if not all(isinstance(size, int) for size in sizes):
            return ask(match, mat1, mat2, op, *more, **options)
        key = f"{op} {tuple(mat1.shape)} {tuple(mat2.shape)} {mat1.dtype}"
        if key in _decided:
            return _decided[key]
        found = ask(match, mat1, mat2, op, *more, **options)
        if isinstance(found, bool):  # a newer release may say more than yes or no
            _decided[key] = found
        return found

    return should_pad
