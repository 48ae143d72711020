"""Seconds of variants that did not run, by those that did: a block of ViT-B/16 on an H200."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from memfit.ir.joint_graph import JointGraph, Variant
from memfit.ir.profile import Measurements, Profile
from memfit.planning.segment.priced_menu import Menu, priced_menu, priced_variant

PROFILE = Path(__file__).parents[3] / "golden" / "vit_b_16_h200.profile.json.gz"


@pytest.fixture(scope="module")
def graph() -> JointGraph:
    return Profile.load(PROFILE).graphs[1]


@pytest.fixture(scope="module")
def reckoned(graph: JointGraph) -> Menu:
    """The menu before anything ran: four variants that cost more and more."""
    menu = priced_menu(graph, Measurements(), 0, None, frozenset())
    costs = sorted((row for row in menu if row[1] > 0), key=lambda row: row[1])
    return (costs[0], costs[len(costs) // 3], costs[2 * len(costs) // 3], costs[-1])


def ran(row: tuple[Variant, float], seconds: float) -> Variant:
    return replace(row[0], seconds=seconds, measured=True)


def seconds(graph: JointGraph, known: Measurements, row: tuple[Variant, float]) -> float:
    return priced_variant(graph, known, row[0].saved, (), None)[1]


def test_where_none_of_a_graph_ran_the_factor_of_others_counts(
    graph: JointGraph, reckoned: Menu
) -> None:
    for row in reckoned:
        assert seconds(graph, Measurements(0.5), row) == pytest.approx(0.5 * row[1])


def test_a_variant_that_ran_takes_what_it_showed(graph: JointGraph, reckoned: Menu) -> None:
    known = Measurements(0.25, (ran(reckoned[1], 0.123),))
    assert seconds(graph, known, reckoned[1]) == 0.123


def test_a_cheap_variant_that_took_nothing_does_not_make_dear_ones_cheap(
    graph: JointGraph, reckoned: Menu
) -> None:
    """ViT-B/16 at 2817 MiB was predicted at 1.02x and took 1.07x."""
    cheap, *_, dear = reckoned
    known = Measurements(0.25, (ran(cheap, 0.25 * cheap[1]),))
    assert seconds(graph, known, dear) == pytest.approx(dear[1] - 0.75 * cheap[1])


def test_what_lies_between_two_that_ran_takes_seconds_between_theirs(
    graph: JointGraph, reckoned: Menu
) -> None:
    first, between, _, last = reckoned
    known = Measurements(3.0, (ran(last, 2 * last[1]), ran(first, first[1])))
    share = (between[1] - first[1]) / (last[1] - first[1])
    expected = first[1] + share * (2 * last[1] - first[1])
    assert seconds(graph, known, between) == pytest.approx(expected)


def test_to_recompute_more_never_takes_less(graph: JointGraph, reckoned: Menu) -> None:
    first, _, later, last = reckoned
    known = Measurements(1.0, (ran(first, 0.5), ran(later, 0.0)))
    assert seconds(graph, known, last) >= 0.5
    menu = priced_menu(graph, known, 0, None, frozenset())
    assert {later[0].saved, first[0].saved} & {variant.saved for variant, _ in menu}


def test_what_keeps_as_much_as_the_unplanned_code_adds_nothing(graph: JointGraph) -> None:
    known = Measurements(2.0)
    assert priced_variant(graph, known, tuple(graph.unplanned), (), None)[1] == 0.0
