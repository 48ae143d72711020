"""Codes keep numbers within their tolerance, and are right on average."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from memfit.runtime.lowbit import log_codes
from memfit.runtime.lowbit import pieces as in_pieces
from memfit.runtime.lowbit.bf16 import to_bf16_
from memfit.runtime.lowbit.log_codes import (
    BLOCK,
    RELATIVE_ERROR,
    SIGNED,
    UNSIGNED,
    Codebook,
    decode,
    encode_,
    num_blocks,
)
from memfit.runtime.lowbit.pieces import pieces

ROUNDING = 1e-5
numbers = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


def round_trip(
    flat: torch.Tensor, book: Codebook, seed: int = 0, *, compiled: bool = False
) -> torch.Tensor:
    return again(flat, book, torch.Generator().manual_seed(seed), compiled=compiled)


def again(
    flat: torch.Tensor, book: Codebook, random: torch.Generator, *, compiled: bool = False
) -> torch.Tensor:
    codes = torch.empty_like(flat, dtype=torch.uint8)
    largest = torch.empty(num_blocks(flat.numel()))
    with pieces(compiled) as how:
        encode_(flat, codes, largest, book, random, how)
        return decode(codes, largest, book, how)


def in_bf16(flat: torch.Tensor, *, compiled: bool = False) -> torch.Tensor:
    result = torch.empty_like(flat, dtype=torch.bfloat16)
    with pieces(compiled) as how:
        to_bf16_(flat, result, torch.Generator().manual_seed(0), how)
    return result.float()


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
        value = again(value, SIGNED, random)
    decayed = value.view(-1, BLOCK)[:, 1:].mean()
    assert float(decayed) == pytest.approx(0.999**500, rel=0.02)


def test_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.randn(3 * BLOCK + 7)
    monkeypatch.setattr(in_pieces, "PIECE", BLOCK)
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
    kept = in_bf16(flat)
    assert bool(((kept - flat).abs() <= flat.abs() * 2**-7).all())


def test_bf16_is_right_on_average() -> None:
    kept = in_bf16(torch.full((100_000,), 1.001))
    assert set(kept.tolist()) == {1.0, 1.0078125}
    assert float(kept.mean()) == pytest.approx(1.001, abs=5e-5)


def test_bf16_keeps_what_it_can_hold() -> None:
    flat = torch.tensor([0.0, -1.5, math.inf, -math.inf, math.nan])
    kept = in_bf16(flat)
    torch.testing.assert_close(kept, flat, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("book", [SIGNED, UNSIGNED])
def test_compiled_for_any_length(book: Codebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_pieces, "COMPILED_PIECE", 20 * BLOCK)
    made = counters["stats"]["unique_graphs"]
    for blocks, more in ((16, 0), (17, 5), (47, 1)):
        flat = torch.randn(blocks * BLOCK + more, generator=torch.Generator().manual_seed(blocks))
        flat = flat if book.zero else flat.abs()
        flat[3] = 0.0
        kept = round_trip(flat, book, compiled=True)
        plain = round_trip(flat, book)
        # Logarithms differ in the last place: here and there a draw falls on the other side.
        assert float((kept != plain).float().mean()) < 1e-3
        allowed = flat.abs() * RELATIVE_ERROR * (1 + ROUNDING)
        smallest = float(flat.abs().max()) * book.smallest
        assert bool(((kept - flat).abs() <= allowed.clamp(min=smallest)).all())
        assert float(kept[3]) == 0.0
    flat[0], flat[BLOCK] = math.nan, math.inf
    kept = round_trip(flat, book, compiled=True)
    assert bool(kept[: 2 * BLOCK].isnan().all()) and bool(kept[2 * BLOCK :].isfinite().all())
    assert counters["stats"]["unique_graphs"] <= made + 2  # one to write, one to read


def test_a_share_is_at_most_all() -> None:
    """As a GPU divides, a number may be more than the whole of itself."""
    table = log_codes._table(SIGNED, torch.device("cpu"))[SIGNED.zero :]
    shares = torch.tensor([1.0, 1.0 + 2**-20, 1.0 - 2**-20, 0.0])
    for draw in (0.0, 0.5, 1.0 - 2**-20):
        steps = log_codes._rounded(shares, torch.full_like(shares, draw), table)
        assert int(steps.max()) == SIGNED.levels and int(steps[3]) == 0


def test_compiled_bf16_is_the_same() -> None:
    for length in (4096, 5001):
        flat = torch.randn(length) * torch.logspace(-30, 30, length)
        flat[:3] = torch.tensor([math.nan, math.inf, 0.0])
        kept, plain = in_bf16(flat, compiled=True), in_bf16(flat)
        torch.testing.assert_close(kept, plain, rtol=0, atol=0, equal_nan=True)
