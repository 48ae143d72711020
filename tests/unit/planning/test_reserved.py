"""The allocator's placement: by hand, against a map of bytes, and over whole steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import InfeasibleError
from memfit.ir.profile import AllocatorStart, Placed, Profile
from memfit.ir.step_graph import Block, StepGraph
from memfit.planning.acts import Run
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.placed import held_bytes
from memfit.planning.reserved import (
    LARGE_PAGE,
    MIB,
    MODEL_ENDS,
    SMALL_PAGE,
    SMALL_REQUEST,
    _Segment,
    allocation_sequence,
    reserved_bytes,
)
from memfit.planning.simulate import Simulator

Chain = Callable[..., Profile]
Profiles = Callable[..., st.SearchStrategy[Profile]]
Disjoint = Callable[[StepGraph, int], Iterator[tuple[Run, ...]]]
PAGE = 10
UNMAPPED, FREE, LIVE = "u", "f", "L"


def _segment(drawing: str = "", holes: Sequence[int] = ()) -> _Segment:
    """A segment with pages of ten bytes whose start is drawn byte by byte: u, f and L."""
    layout, address = [], 0
    for state, stretch in groupby(drawing.replace(" ", "")):
        size = len(list(stretch))
        if state != UNMAPPED:
            layout.append(Placed(address, size, state == FREE))
        address += size
    return _Segment(PAGE, layout, holes)


# -- one segment, by hand -------------------------------------------------------------------------


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    segment = _segment("ffffffffLL fffLffffLL fffffLLLLL")
    assert segment.take(4) == 14
    assert segment.take(4) == 20
    assert segment.take(4) == 0
    assert segment.mapped == 0


def test_among_equal_blocks_the_lowest_address_is_taken() -> None:
    segment = _segment("LLfffLLLLL fffLLLLfff")
    assert [segment.take(3) for _ in range(3)] == [2, 10, 17]


def test_the_rest_of_a_split_block_stays_free() -> None:
    segment = _segment("ffffffffff")
    assert [segment.take(n) for n in (3, 3, 4)] == [0, 3, 6]
    assert segment.mapped == 0
    assert segment.take(1) == 10
    assert segment.mapped == PAGE


def test_a_larger_block_is_taken_before_one_that_could_grow() -> None:
    segment = _segment("LLLLLfffff LLLffffLLL LLLLLLffff")
    assert segment.take(3) == 13, "the smallest of those with no room after them"
    assert segment.take(5) == 5
    assert segment.take(4) == 26, "the tail, when nothing else fits"


def test_freed_neighbours_merge_on_both_sides() -> None:
    segment = _segment()
    first, middle, last, wall = (segment.take(n) for n in (3, 3, 3, 1))
    assert (first, middle, last, wall) == (0, 3, 6, 9)
    segment.give(first, 3)
    segment.give(last, 3)
    segment.give(middle, 3)
    assert segment.take(9) == 0, "three blocks became one"
    assert segment.mapped == PAGE


@pytest.mark.parametrize("order", [(0, 3), (3, 0)])
def test_freed_neighbours_merge_whoever_comes_first(order: tuple[int, int]) -> None:
    segment = _segment()
    for size in (3, 3, 4):
        segment.take(size)
    for address in order:
        segment.give(address, 3)
    assert segment.take(6) == 0


def test_growth_is_by_whole_pages_and_begins_in_the_free_tail() -> None:
    segment = _segment()
    assert (segment.take(4), segment.mapped) == (0, PAGE)
    assert (segment.take(13), segment.mapped) == (4, 2 * PAGE), "six bytes of the first page"
    assert (segment.take(24), segment.mapped) == (17, 5 * PAGE)
    assert (segment.take(9), segment.mapped) == (41, 5 * PAGE)


def test_what_is_mapped_stays_mapped() -> None:
    segment = _segment()
    segment.give(segment.take(35), 35)
    assert segment.mapped == 4 * PAGE
    assert (segment.take(40), segment.mapped) == (0, 4 * PAGE)


def test_gaps_of_the_start_are_mapped_lowest_first() -> None:
    segment = _segment("LLLLLLLLLL uuuuuuuuuu LLLLLLLLLL uuuuuuuuuu uuuuuuuuuu LLLLLLLLLL")
    assert (segment.take(15), segment.mapped) == (30, 2 * PAGE), "the first gap has no room"
    assert (segment.take(6), segment.mapped) == (10, 3 * PAGE)
    assert (segment.take(8), segment.mapped) == (60, 4 * PAGE)


def test_a_gap_is_mapped_no_further_than_needed() -> None:
    segment = _segment("LLLLLLLLLL uuuuuuuuuu uuuuuuuuuu LLLLLLLLLL")
    assert (segment.take(7), segment.mapped) == (10, PAGE)
    assert (segment.take(12), segment.mapped) == (17, 2 * PAGE), "on from the free tail"


def test_a_gap_counts_with_the_free_blocks_on_both_sides() -> None:
    segment = _segment("LLLLLLLfff uuuuuuuuuu ffffffLLLL")
    assert (segment.take(19), segment.mapped) == (7, PAGE)


def test_pages_mapped_before_a_free_block_merge_with_it() -> None:
    segment = _segment("LLLLLLLLLL uuuuuuuuuu fffffLLLLL")
    assert (segment.take(6), segment.mapped) == (10, PAGE)
    assert (segment.take(9), segment.mapped) == (16, PAGE), "the page's rest and the block after"


def test_a_request_larger_than_every_gap_goes_to_the_top() -> None:
    segment = _segment("LLLLLLLLLL uuuuuuuuuu LLLLLLLfff")
    assert (segment.take(25), segment.mapped) == (27, 3 * PAGE)
    assert (segment.take(10), segment.mapped) == (10, 4 * PAGE)


def test_holes_elsewhere_are_used_but_never_merge() -> None:
    segment = _segment("", holes=[4, 4, 6])
    four, also_four, six = segment.take(4), segment.take(3), segment.take(6)
    assert len({four, also_four, six}) == 3
    assert max(four, also_four, six) < 0 == segment.mapped
    segment.give(four, 4)
    segment.give(also_four, 3)
    segment.give(six, 6)
    assert (segment.take(7), segment.mapped) == (0, PAGE), "none has seven bytes"
    assert segment.take(6) == six


def test_trim_gives_whole_free_pages_back_and_keeps_the_rest() -> None:
    segment = _segment()
    low, middle, high = segment.take(7), segment.take(29), segment.take(14)
    assert segment.mapped == 5 * PAGE
    segment.give(middle, 29)  # 7 to 36: only pages 1 and 2 are free from end to end
    segment.trim()
    assert segment.mapped == 3 * PAGE
    assert (segment.take(6), segment.take(3), segment.mapped) == (30, 7, 3 * PAGE)
    assert (segment.take(5), segment.mapped) == (10, 4 * PAGE), "the lowest page given back"
    segment.give(low, 7)
    segment.give(high, 14)
    segment.trim()
    assert segment.mapped == 3 * PAGE, "of the tail, 36 to 50, one page is whole"


def test_trim_can_go_below_the_start_and_leaves_holes_elsewhere_alone() -> None:
    segment = _segment("LLLLLfffff ffffffffff LLLLLLLLLL", holes=[25])
    segment.trim()
    assert segment.mapped == -PAGE
    assert segment.take(25) < 0
    assert (segment.take(15), segment.mapped) == (5, 0), "the kept tail and the page given back"


def test_trim_twice_gives_nothing_more_back() -> None:
    segment = _segment()
    segment.give(segment.take(35), 35)
    segment.trim()
    segment.trim()
    assert segment.mapped == 0
    assert (segment.take(35), segment.mapped) == (0, 4 * PAGE)


# -- one segment, against a map of bytes ----------------------------------------------------------


class _ByteMap:
    """The same allocator, plainly: the state of every byte, searched from the bottom."""

    def __init__(self, drawing: str) -> None:
        self.bytes = list(drawing)
        self.mapped_at_start = self.mapped

    @property
    def mapped(self) -> int:
        return sum(state != UNMAPPED for state in self.bytes)

    def stretches(self, states: str) -> list[tuple[int, int]]:
        found, address = [], 0
        for inside, stretch in groupby(self.bytes, lambda state: state in states):
            size = len(list(stretch))
            if inside:
                found.append((size, address))
            address += size
        return found

    def take(self, size: int) -> int:
        fitting = sorted(block for block in self.stretches(FREE) if block[0] >= size)
        if fitting:
            # The first one, unless the next larger ones have less room to grow into.
            rooms = [self._room(*block) for block in fitting]
            falling = next((n for n, pair in enumerate(pairwise(rooms)) if pair[0] <= pair[1]), -1)
            address = fitting[falling][1]
        else:  # whatever is above was never used and is as good as unmapped
            self.bytes += [UNMAPPED] * (-(-size // PAGE) * PAGE)
            room = self.stretches(FREE + UNMAPPED)
            address = next(address for length, address in room if length >= size)
        for at in range(address, address + size):
            if self.bytes[at] == UNMAPPED:
                page = at // PAGE * PAGE
                self.bytes[page : page + PAGE] = [FREE] * PAGE
        assert set(self.bytes[address : address + size]) == {FREE}, "live blocks never overlap"
        self.bytes[address : address + size] = [LIVE] * size
        return address

    def _room(self, size: int, address: int) -> float:
        after = "".join(self.bytes[address + size :])
        unmapped = len(after) - len(after.lstrip(UNMAPPED))
        return inf if unmapped == len(after) else size + unmapped

    def give(self, address: int, size: int) -> None:
        self.bytes[address : address + size] = [FREE] * size

    def trim(self) -> None:
        for page in range(0, len(self.bytes), PAGE):
            if set(self.bytes[page : page + PAGE]) == {FREE}:
                self.bytes[page : page + PAGE] = [UNMAPPED] * PAGE


_PAGES = st.one_of(
    st.sampled_from([UNMAPPED * PAGE, FREE * PAGE, LIVE * PAGE]),
    st.just(UNMAPPED * PAGE),
    st.integers(1, PAGE - 1).map(lambda n: FREE * n + LIVE * (PAGE - n)),
    st.integers(1, PAGE - 1).map(lambda n: LIVE * n + FREE * (PAGE - n)),
)
_MOVES = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 25)),
    st.tuples(st.just("give"), st.integers(0, 50)),
    st.tuples(st.just("trim"), st.just(0)),
)


@settings(max_examples=300, deadline=None)
@given(
    drawing=st.lists(_PAGES, max_size=8).map("".join),
    moves=st.lists(_MOVES, max_size=40),
)
def test_a_segment_places_like_the_map_of_bytes(drawing: str, moves: list[tuple[str, int]]) -> None:
    segment, plain = _segment(drawing), _ByteMap(drawing)
    live: dict[int, int] = {}

    def check() -> None:
        assert segment.mapped == plain.mapped - plain.mapped_at_start
        assert segment.mapped % PAGE == 0
        assert segment._free == sorted(plain.stretches(FREE)), "free neighbours are one block"
        assert segment.mapped + drawing.count(FREE) >= sum(live.values())

    for move, number in moves:
        if move == "take":
            address = segment.take(number)
            assert address == plain.take(number)
            live[address] = number
        elif move == "give" and live:
            address = list(live)[number % len(live)]
            size = live.pop(address)
            segment.give(address, size)
            plain.give(address, size)
        elif move == "trim":
            segment.trim()
            plain.trim()
        check()
    for address, size in live.items():
        segment.give(address, size)
    segment.trim()
    free_pages = [drawing[at : at + PAGE] for at in range(0, len(drawing), PAGE)].count(FREE * PAGE)
    assert segment.mapped == -free_pages * PAGE, "nothing is left beyond the start"


# -- the sequence of a step -----------------------------------------------------------------------


def _without_states(profile: Profile) -> Profile:
    calls = tuple(replace(call, state_bytes=0) for call in profile.graph.calls)
    return replace(profile, graph=replace(profile.graph, calls=calls))


def _draw_step(
    data: st.DataObject, profiles: Profiles, disjoint_runs: Disjoint
) -> tuple[Profile, tuple[Run, ...]]:
    profile = _without_states(data.draw(profiles(4, accumulate=2)))
    return profile, data.draw(st.sampled_from(list(disjoint_runs(profile.graph, 3))))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_sequence_has_the_peak_of_the_simulator(
    data: st.DataObject, random_profiles: Profiles, disjoint_runs: Disjoint
) -> None:
    profile, runs = _draw_step(data, random_profiles, disjoint_runs)
    simulator = Simulator(profile)
    live = highest = 0
    for _, size in allocation_sequence(simulator, runs):
        live += size
        assert live >= 0
        highest = max(highest, live)
    assert highest + simulator.graph.static_bytes == simulator.peak_bytes(runs)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_what_the_sequence_makes_is_freed_once_or_lives_to_the_end(
    data: st.DataObject, random_profiles: Profiles, disjoint_runs: Disjoint
) -> None:
    profile, runs = _draw_step(data, random_profiles, disjoint_runs)
    simulator = Simulator(profile)
    made: set[tuple[int, int]] = set()
    live: set[tuple[int, int]] = set()
    ends = 0
    for key, size in allocation_sequence(simulator, runs):
        if key == MODEL_ENDS:
            ends += 1
            assert size == 0
            continue
        assert abs(size) == simulator.bytes[key[0]]
        if key in live:
            assert size <= 0
            live.remove(key)
        else:
            assert size >= 0
            assert key not in made
            made.add(key)
            live.add(key)
    assert ends == 1
    length, deaths = simulator.graph.length, simulator.deaths(runs)
    lasting = {(b, -1) for b in range(len(deaths)) if deaths[b] >= length}
    assert live == lasting, "no replayed block, and no other original"
    assert {block for block, run in made if run < 0} == set(range(len(deaths)))


def test_the_sequence_of_a_chain_replays_in_the_backward(chain: Chain) -> None:
    simulator = Simulator(chain(2, inner=1000, output=100))
    kept = list(allocation_sequence(simulator, []))
    assert [size for _, size in kept] == [1000, 100, 1000, 100, 0, -100, -100, -1000, -1000]
    recomputed = list(allocation_sequence(simulator, [(1, 1)]))
    assert [pair for pair in recomputed if pair[0][1] == 1] == [((2, 1), 1000), ((2, 1), -1000)]
    assert recomputed.index(((2, -1), -1000)) < recomputed.index(((2, 1), 1000))


# -- reserved bytes of a step ---------------------------------------------------------------------


def test_without_an_allocator_start_reserved_bytes_are_not_known(chain: Chain) -> None:
    simulator = Simulator(chain(3))
    assert reserved_bytes(simulator, []) is None
    assert reserved_bytes(simulator, [(0, 2)], trim=True) is None
    assert held_bytes(simulator, []) == simulator.peak_bytes([])


def test_small_and_large_requests_grow_their_own_segments(chain: Chain) -> None:
    start = AllocatorStart(7)
    small = chain(3, inner=SMALL_REQUEST, output=512, allocator=start)
    # Three of a mebibyte and three outputs: the fourth mebibyte has room for those.
    assert reserved_bytes(Simulator(small), []) == 7 + 2 * SMALL_PAGE
    large = chain(3, inner=SMALL_REQUEST + 512, output=512, allocator=start)
    assert reserved_bytes(Simulator(large), []) == 7 + SMALL_PAGE + LARGE_PAGE


def test_the_whole_request_must_be_under_the_cap_before_a_segment_grows(chain: Chain) -> None:
    """Even where free bytes at the end of the segment take its beginning."""
    request = LARGE_PAGE + 4 * MIB
    start = AllocatorStart(LARGE_PAGE, large=(Placed(0, LARGE_PAGE, True),))
    profile = chain(1, inner=request, output=512, allocator=start)
    assert reserved_bytes(Simulator(profile), []) == LARGE_PAGE + request


def test_the_free_memory_of_the_start_is_used_first(chain: Chain) -> None:
    layout = (Placed(0, 30 * MIB, False), Placed(30 * MIB, 10 * MIB, True))
    start = AllocatorStart(80 * MIB, large=layout, holes=(512, 6 * MIB))
    profile = chain(1, inner=10 * MIB, output=512, allocator=start)
    assert reserved_bytes(Simulator(profile), []) == 80 * MIB
    profile = chain(1, inner=11 * MIB, output=512, allocator=start)
    assert reserved_bytes(Simulator(profile), []) == 100 * MIB


def test_a_block_of_no_bytes_is_placed_nowhere(chain: Chain) -> None:
    profile = chain(2, inner=0, output=512, allocator=AllocatorStart(0))
    assert reserved_bytes(Simulator(profile), [(0, 1)]) == SMALL_PAGE


def test_trim_frees_the_pages_that_a_later_request_does_not_fit_in(chain: Chain) -> None:
    """Not always a gain: best fit has no such order, and trimming can cost a chain a page."""
    blocks = (
        Block(0, 40 * MIB, birth=1, death=3, category="temporaries"),
        Block(1, 20 * MIB, birth=2, death=7, category="activations"),
        Block(2, 60 * MIB, birth=5, death=6, category="temporaries"),
    )
    profile = chain(1, allocator=AllocatorStart(0))
    graph = StepGraph(8, 4, 4, 7, {}, (), blocks)
    simulator = Simulator(replace(profile, graph=graph, call_times=()))
    assert reserved_bytes(simulator, []) == 120 * MIB
    assert reserved_bytes(simulator, [], trim=True) == 80 * MIB


@settings(max_examples=150, deadline=None)
@given(data=st.data(), trim=st.booleans())
def test_reserved_bytes_cover_the_live_ones(
    data: st.DataObject, trim: bool, random_profiles: Profiles, disjoint_runs: Disjoint
) -> None:
    profile, runs = _draw_step(data, random_profiles, disjoint_runs)
    simulator = Simulator(replace(profile, allocator=AllocatorStart(1000)))
    reserved = reserved_bytes(simulator, runs, trim)
    assert reserved is not None
    grown = reserved - 1000
    assert grown >= simulator.peak_bytes(runs) - simulator.graph.static_bytes
    assert grown % SMALL_PAGE == 0


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_trim_changes_nothing_before_the_model_ends(
    data: st.DataObject, random_profiles: Profiles, disjoint_runs: Disjoint
) -> None:
    profile, runs = _draw_step(data, random_profiles, disjoint_runs)
    late = replace(profile.graph, model_end=profile.graph.length)
    profile = replace(profile, graph=late, allocator=AllocatorStart(0))
    simulator = Simulator(profile)
    assert reserved_bytes(simulator, runs, trim=True) == reserved_bytes(simulator, runs)


# -- plans under a start --------------------------------------------------------------------------


def _check_goal(profile: Profile, budget: int) -> None:
    """The plan holds its budget, or the refusal's minimum has a plan that holds it."""
    try:
        plan = make_plan(profile, Goal(budget_bytes=budget))
    except InfeasibleError as refusal:
        assert refusal.minimum_bytes is not None
        assert refusal.minimum_bytes > budget
        budget = refusal.minimum_bytes
        plan = make_plan(profile, Goal(budget_bytes=budget))
    simulator = Simulator(profile)
    assert plan.counts == "reserved"
    assert plan.predicted.peak_bytes <= plan.predicted.reserved_bytes <= budget
    assert plan.predicted.reserved_bytes == held_bytes(simulator, plan.runs, plan.trim)
    assert plan.minimum_feasible_bytes <= budget


@pytest.mark.parametrize("share", [0.1, 0.5, 0.7, 0.8, 0.9, 0.97, 1.0])
def test_plans_of_a_chain_hold_their_budget_in_reserved_bytes(chain: Chain, share: float) -> None:
    static = 60 * MIB
    layout = (Placed(0, 50 * MIB, False), Placed(50 * MIB, 10 * MIB, True))
    start = AllocatorStart(80 * MIB, large=layout, holes=(15 * MIB,))
    profile = chain(8, inner=33 * MIB, output=7 * MIB, static=static, allocator=start)
    unplanned = held_bytes(Simulator(profile), [])
    _check_goal(profile, int(share * unplanned))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), share=st.floats(0.2, 1.1))
def test_plans_hold_their_budget_in_reserved_bytes(
    data: st.DataObject, share: float, random_profiles: Profiles
) -> None:
    profile = data.draw(random_profiles(4, accumulate=2))
    static = profile.graph.static_bytes
    profile = replace(profile, allocator=AllocatorStart(static + 3 * MIB), trim_s=0.01)
    _check_goal(profile, max(1, int(share * held_bytes(Simulator(profile), []))))


def test_a_reduction_of_activations_counts_live_bytes(chain: Chain) -> None:
    profile = chain(8, inner=33 * MIB, output=7 * MIB, allocator=AllocatorStart(10**9))
    plan = make_plan(profile, Goal(activation_reduction=0.4))
    assert plan.counts == "live"
    assert plan.predicted.reserved_bytes == plan.predicted.peak_bytes
