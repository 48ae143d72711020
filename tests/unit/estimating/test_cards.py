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


# Written down a second time, so that a slip of a digit in the table shows.
FACTS: dict[str, tuple[float, float, float, float, float, int]] = {
    # name: GiB, TFLOP/s of fp16, tf32 and fp32, GB/s, generation of PCIe
    "T4": (14.56, 65.0, 8.1, 8.1, 320, 3),
    "RTX 3060": (11.76, 25.5, 12.7, 12.7, 360, 4),
    "RTX 3090": (23.69, 71.0, 35.6, 35.6, 936, 4),
    "RTX 4070 Ti": (11.72, 80.2, 40.1, 40.1, 504, 4),
    "RTX 4080": (15.70, 97.5, 48.7, 48.7, 717, 4),
    "RTX 4090 Laptop": (15.70, 66.0, 33.0, 33.0, 576, 4),
    "RTX 4090": (23.64, 165.2, 82.6, 82.6, 1008, 4),
    "RTX 5070 Ti": (15.47, 87.9, 43.9, 43.9, 896, 5),
    "RTX 5080": (15.47, 112.6, 56.3, 56.3, 960, 5),
    "RTX 5090": (31.36, 209.5, 104.8, 104.8, 1792, 5),
    "A100 40GB": (39.39, 312.0, 156.0, 19.5, 1555, 4),
    "A100 80GB": (79.15, 312.0, 156.0, 19.5, 2039, 4),
    "H100": (79.10, 989.4, 494.7, 66.9, 3350, 5),
    "H200": (139.72, 989.4, 494.7, 66.9, 4800, 5),
}
REQUIRED = (
    *("T4", "RTX 3060", "RTX 3090", "RTX 4070 Ti", "RTX 4080", "RTX 4090", "RTX 4090 Laptop"),
    *("RTX 5070 Ti", "RTX 5080", "RTX 5090", "A100", "H100", "H200"),
)


def test_required_cards_were_not_all_named() -> None:
    assert len(REQUIRED) == 13
    found = {find_card(name).name for name in REQUIRED}
    assert found == {card.name for card in CARDS} - {"A100 40GB"}, "an A100 is that of 80 GB"
    assert FACTS.keys() == {card.name for card in CARDS}


@pytest.mark.parametrize("name", FACTS)
def test_a_card_has_these_facts(name: str) -> None:
    card = find_card(name)
    gibibytes, half, tf32, fp32, gb_per_s, pcie = FACTS[name]
    assert card.memory_bytes == int(gibibytes * GIB)
    rates = (card.half_flops, card.tf32_flops, card.fp32_flops, card.bytes_per_s)
    assert rates == (half * 1e12, tf32 * 1e12, fp32 * 1e12, gb_per_s * 1e9)
    assert card.pcie == pcie
    assert card.copy_bytes_per_s == {3: 12.5e9, 4: 25e9, 5: 50e9}[pcie]
    assert card.bf16 == (name != "T4") and card.hopper == (name in ("H100", "H200"))
