"""Bytes and seconds as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import UsageError
from memfit.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (123, 123),
        ("123", 123),
        ("16GiB", 16 * 2**30),
        ("16GB", 16 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        (" 2 mib ", 2 * 2**20),
        ("7kB", 7000),
        (".5KiB", 512),
        ("3.B", 3),
        ("2TB", 2 * 10**12),
        ("9007199254740993", 2**53 + 1),
        ("-5", None),
        ("GiB", None),
        ("1 GiBs", None),
        ("1e9", None),
        ("", None),
        ("1,5GB", None),
        ("1.5", None),
        (True, None),
        (1.5, None),
        (None, None),
    ],
)
def test_parse_bytes(text: Any, size: int | None) -> None:
    if size is not None:
        assert parse_bytes(text) == size
        return
    with pytest.raises(UsageError) as refusal:
        parse_bytes(text)
    assert refusal.value.hint and repr(text) in refusal.value.message


def test_a_negative_number_is_passed_on_for_others_to_refuse() -> None:
    assert parse_bytes(-3) == -3


@pytest.mark.parametrize("text", ["-5", " -1.5GiB "])
def test_a_negative_size_in_words_was_called_no_number_of_bytes(text: str) -> None:
    with pytest.raises(UsageError, match=f"'{text}' is below 0\nhint: "):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 * 2**20, "1.50 GiB"),
        (-2048, "-2.00 KiB"),
        (5 * 2**40, "5.00 TiB"),
        (5000 * 2**40, "5000.00 TiB"),
    ],
)
def test_format_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, 2**45))
def test_what_is_printed_is_read_back_to_a_hundredth(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.006)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0000125, "12.5 us"),
        (0.0123, "12.3 ms"),
        (4.561, "4.56 s"),
        (119.0, "119.00 s"),
        (200.4, "3 min 20 s"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
