"""The table of cards: found by any of their names, with facts that can be true."""

from __future__ import annotations

import pytest

from memfit.errors import UsageError
from memfit.ir.cards import CARDS, GIB, find_card


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("rtx4090", "RTX 4090"),
        ("RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("5070ti", "RTX 5070 Ti"),
        ("Tesla T4", "T4"),
        ("a100", "A100 80GB"),
        ("A100-40GB", "A100 40GB"),
        ("nvidia h200", "H200"),
    ],
)
def test_names_are_found_loosely(name: str, found: str) -> None:
    assert find_card(name).name == found


def test_every_card_is_found_by_its_own_name() -> None:
    assert [find_card(card.name) for card in CARDS] == list(CARDS)


def test_an_unknown_card_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="unknown card 'rtx9999'") as error:
        find_card("rtx9999")
    assert error.value.hint is not None
    assert all(card.name in error.value.hint for card in CARDS)


def test_facts_can_be_true() -> None:
    for card in CARDS:
        assert 10 * GIB < card.usable_bytes < card.memory_bytes < 150 * GIB
        assert card.half_flops >= card.tf32_flops >= card.fp32_flops > 1e12
        assert card.bytes_per_s > 10 * card.copy_bytes_per_s
    assert find_card("h200").workspace_bytes > find_card("a100").workspace_bytes
