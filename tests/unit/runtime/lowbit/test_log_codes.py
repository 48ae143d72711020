"""Codes keep numbers within their tolerance, and are right on average."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.runtime.lowbit import log_codes
from memfit.runtime.lowbit.bf16 import to_bf16
from memfit.runtime.lowbit.log_codes import (
    BLOCK,
    RELATIVE_ERROR,
    SIGNED,
    UNSIGNED,
    Codebook,
    decode,
    encode,
)

ROUNDING = 1e-5
numbers = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


def round_trip(flat: torch.Tensor, book: Codebook, seed: int = 0) -> torch.Tensor:
    return decode(*encode(flat, book, torch.Generator().manual_seed(seed)), book)


@settings(deadline=None, max_examples=100)
@given(st.lists(numbers, min_size=1, max_size=600), st.integers(0, 99))
def test_signed_numbers(values: list[float], seed: int) -> None:
    flat = torch.tensor(values)
    back = round_trip(flat, SIGNED, seed)
    for block, kept in zip(flat.split(BLOCK), back.split(BLOCK), strict=True):
        largest = block.abs().max()
        allowed = (block.abs() * RELATIVE_ERROR).clamp(min=float(largest) * SIGNED.smallest)
        assert bool(((kept - block).abs() <= allowed * (1 + ROUNDING)).all())
        assert bool(((kept == 0) | (kept.sign() == block.sign())).all())
        assert float(kept.abs().max()) == float(largest)


@settings(deadline=None, max_examples=100)
@given(st.lists(numbers.map(abs), min_size=1, max_size=600), st.integers(0, 99))
def test_numbers_without_sign(values: list[float], seed: int) -> None:
    flat = torch.tensor(values)
    back = round_trip(flat, UNSIGNED, seed)
    for block, kept in zip(flat.split(BLOCK), back.split(BLOCK), strict=True):
        smallest = float(block.max()) * UNSIGNED.smallest
        allowed = (block * RELATIVE_ERROR).clamp(min=smallest)
        assert bool(((kept - block).abs() <= allowed * (1 + ROUNDING)).all())
        if smallest > torch.finfo(torch.float32).tiny:
            assert torch.equal(kept == 0, block == 0)


@pytest.mark.parametrize("book", [SIGNED, UNSIGNED])
@pytest.mark.parametrize("share", [0.93, 3.3e-4])
def test_right_on_average(book: Codebook, share: float) -> None:
    blocks = torch.full((4000, BLOCK), share)
    blocks[:, 0] = 1.0
    back = round_trip(blocks.view(-1), book).view(-1, BLOCK)[:, 1:]
    assert float(back.mean()) == pytest.approx(share, rel=1e-3)


def test_an_average_that_moves_little_still_moves() -> None:
    value = torch.ones(BLOCK * 40)
    random = torch.Generator().manual_seed(0)
    for _ in range(500):
        value.view(-1, BLOCK)[:, 1:] *= 0.999  # the first of each block stays
        value = decode(*encode(value, SIGNED, random), SIGNED)
    decayed = value.view(-1, BLOCK)[:, 1:].mean()
    assert float(decayed) == pytest.approx(0.999**500, rel=0.02)


def test_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.randn(3 * BLOCK + 7)
    monkeypatch.setattr(log_codes, "PIECE", BLOCK)
    back = round_trip(flat, SIGNED)
    assert float(((back - flat).abs() / flat.abs()).max()) <= RELATIVE_ERROR * (1 + ROUNDING)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(bad: float) -> None:
    flat = torch.ones(2 * BLOCK)
    flat[3] = bad
    back = round_trip(flat, SIGNED)
    assert bool(back[:BLOCK].isnan().all()) and torch.equal(back[BLOCK:], flat[BLOCK:])


def test_bf16_takes_a_neighbour() -> None:
    flat = torch.randn(10_000) * torch.logspace(-30, 30, 10_000)
    kept = to_bf16(flat, torch.Generator().manual_seed(0)).float()
    assert bool(((kept - flat).abs() <= flat.abs() * 2**-7).all())


def test_bf16_is_right_on_average() -> None:
    kept = to_bf16(torch.full((100_000,), 1.001), torch.Generator().manual_seed(0)).float()
    assert set(kept.tolist()) == {1.0, 1.0078125}
    assert float(kept.mean()) == pytest.approx(1.001, abs=5e-5)


def test_bf16_keeps_what_it_can_hold() -> None:
    flat = torch.tensor([0.0, -1.5, math.inf, -math.inf, math.nan])
    kept = to_bf16(flat, torch.Generator().manual_seed(0)).float()
    torch.testing.assert_close(kept, flat, rtol=0, atol=0, equal_nan=True)
