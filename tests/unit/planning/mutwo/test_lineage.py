"""Algorithms D to F: each rule by hand on chains, and all of them against a plain transcription."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.planning.mutwo.lineage import Lineage
from memfit.planning.mutwo.step import NEVER_S, RECOMPUTE, RETAINED, SWAP, Candidate

A, B, C, D = range(4)


def _chain(*seconds: float) -> Lineage:
    """a -> b -> c ...: each made of the one before, and used at one moment in backward order."""
    return Lineage(
        [
            _tensor("abcd"[i], 100 - 10 * i, 100 - 10 * i, s, (i - 1,) if i else ())
            for i, s in enumerate(seconds)
        ]
    )


def _tensor(
    name: str, first: int, last: int, seconds: float, sources: tuple[int, ...] = ()
) -> Candidate:
    return Candidate(name, 12, 0, first, last, seconds, sources, swap_s=1.0)


def test_at_first_each_is_made_of_what_is_kept() -> None:
    lineage = _chain(1.0, 2.0, 3.0)
    assert lineage.total_s == [1.0, 2.0, 3.0]
    assert [lineage.ratio(n) for n in (A, B, C)] == [12.0, 6.0, 4.0]
    assert lineage.best() == A


# -- E --------------------------------------------------------------------------------------------


def test_an_earlier_recomputation_is_made_of_the_sources_of_its_source() -> None:
    lineage = _chain(1.0, 2.0, 3.0)
    lineage.recompute(C)
    assert lineage.sources[C] == {B} and lineage.recompute_count[C] == 1
    lineage.recompute(B)
    assert lineage.sources[C] == {A} and lineage.recompute_s[C] == 5.0
    assert lineage.recompute_count[B] == 2, "once for itself and once for c"
    lineage.recompute(A)
    assert lineage.sources[C] == set() and lineage.recompute_s == [1.0, 3.0, 6.0]
    assert lineage.recompute_count == [3, 2, 1]


def test_seconds_before_operators_are_those_of_the_recomputations_there() -> None:
    lineage = _chain(1.0, 2.0, 3.0)
    lineage.recompute(C)
    lineage.recompute(B)
    assert lineage.scheduled_s() == {90: 2.0, 80: 5.0}


def test_a_source_that_is_swapped_is_brought_back_for_an_earlier_recomputation() -> None:
    lineage = _chain(1.0, 2.0, 3.0)
    lineage.recompute(C)
    lineage.swap(B)
    assert lineage.sources[C] == {B} and lineage.recompute_s[C] == 3.0
    assert lineage.live(B) == (80, 90) and lineage.due(B) == 80, "before c is made again"


def test_a_swapped_tensor_taken_over_as_a_source_is_brought_back_earlier() -> None:
    candidates = [
        _tensor("a", 85, 100, 1.0),
        _tensor("b", 90, 90, 2.0, (A,)),
        _tensor("c", 80, 80, 3.0, (B,)),
    ]
    lineage = Lineage(candidates)
    lineage.recompute(C)
    lineage.swap(A)
    assert lineage.sources[B] == {A} and lineage.due(A) == 85
    lineage.recompute(B)
    assert lineage.sources[C] == {A} and lineage.due(A) == 80


# -- F --------------------------------------------------------------------------------------------


def test_a_remaining_candidate_is_made_of_the_sources_of_its_source() -> None:
    lineage = _chain(1.0, 2.0, 3.0)
    lineage.recompute(B)
    assert lineage.sources[C] == {A}
    assert (lineage.recompute_s[C], lineage.total_s[C], lineage.ratio(C)) == (5.0, 5.0, 2.4)


def test_its_total_counts_it_once_more_for_each_recomputation_that_needs_it() -> None:
    lineage = _chain(1.0, 2.0, 3.0, 4.0)
    lineage.recompute(D)
    assert lineage.total_s[C] == 3.0, "count 1 of d times its time"
    lineage.recompute(B)
    assert lineage.total_s[C] == (3.0 + 2.0) * 2, "for its own use and for d"


def test_a_candidate_used_while_its_source_is_there_keeps_it() -> None:
    lineage = Lineage([_tensor("a", 60, 90, 1.0), _tensor("b", 80, 80, 2.0, (A,))])
    lineage.recompute(A)
    assert lineage.sources[B] == {A} and lineage.total_s[B] == 2.0


def test_a_source_of_what_was_chosen_is_priced_at_its_count() -> None:
    lineage = _chain(1.0, 2.0, 3.0, 4.0)
    lineage.recompute(D)
    lineage.recompute(C)
    assert lineage.recompute_count[C] == 2
    assert lineage.total_s[B] == 2 * 2.0 and lineage.ratio(B) == 3.0
    assert lineage.total_s[A] == 1.0


def test_a_swapped_source_is_no_source_outside_its_live_interval() -> None:
    lineage = _chain(1.0, 2.0, 3.0)
    lineage.swap(B)
    assert lineage.sources[C] == {A} and lineage.total_s[C] == 5.0
    assert lineage.total_s[A] == 1.0, "a swapped tensor is not made of anything"


def test_a_swapped_source_is_one_inside_its_live_interval() -> None:
    candidates = [
        _tensor("a", 70, 90, 1.0),
        _tensor("b", 80, 80, 2.0, (A,)),
        _tensor("c", 60, 60, 3.0, (A,)),
    ]
    lineage = Lineage(candidates)
    lineage.swap(A)
    assert lineage.sources[B] == {A} and lineage.total_s[B] == 2.0
    assert lineage.sources[C] == set() and lineage.total_s[C] == 4.0


def test_nothing_is_made_of_a_swapped_source_that_cannot_be_made_again() -> None:
    lineage = _chain(NEVER_S, 2.0, 3.0)
    lineage.swap(A)
    assert lineage.total_s[B] == NEVER_S and lineage.best() == C
    lineage.swap(B)
    assert lineage.best() is None


def test_a_source_that_is_gone_for_another_moment_is_made_again_too() -> None:
    """c keeps the recomputed b, which is there then; for d, made of c, b has to be made again."""
    candidates = [
        _tensor("a", 100, 100, 1.0),
        _tensor("b", 60, 90, 2.0, (A,)),
        _tensor("c", 80, 80, 3.0, (B,)),
        _tensor("d", 50, 50, 4.0, (C,)),
    ]
    lineage = Lineage(candidates)
    for number in (D, B, C):
        lineage.recompute(number)
    assert lineage.sources[C] == {B} and lineage.recompute_s[C] == 3.0
    assert lineage.sources[D] == {A} and lineage.recompute_s[D] == 4.0 + 3.0 + 2.0
    assert lineage.recompute_count == [0, 2, 2, 1]


# -- against a plain transcription ----------------------------------------------------------------


class _Plain:
    """E and F as they are written: loops over everything, sets of sources, nothing looked up."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = candidates
        self.srcs = {n: set(c.sources) for n, c in enumerate(candidates)}
        self.time = {n: c.recompute_s for n, c in enumerate(candidates)}
        self.total = dict(self.time)
        self.recomps: list[int] = []
        self.swaps: list[int] = []

    def interval(self, t: int) -> tuple[int, int]:
        own = self.candidates[t]
        ranks = [own.first_backward, own.last_backward]
        if t not in self.recomps:
            ranks += [self.at(rp) for rp in self.recomps if t in self.srcs[rp]]
        return min(ranks), max(ranks)

    def at(self, n: int) -> int:
        return self.candidates[n].first_backward

    def gone(self, source: int, reader: int) -> bool:
        if source not in self.recomps and source not in self.swaps:
            return False
        if source in self.swaps and reader in self.recomps:
            return False
        first, last = self.interval(source)
        return not first <= self.at(reader) <= last

    def replace(self, reader: int, t: int) -> None:
        """Put the sources of t in its place, and those of any of them that is gone."""
        had = self.srcs[reader] - {t}
        pending, done = [t], []
        while pending:
            missing = pending.pop(0)
            done.append(missing)
            self.time[reader] += self.time[missing]
            for source in self.srcs[missing]:
                if source in had or source in done or source in pending:
                    continue
                if self.gone(source, reader):
                    pending.append(source)
                else:
                    had.add(source)
        self.srcs[reader] = had

    def choose(self, t: int, choice: str) -> int:
        count = 1
        if choice == RECOMPUTE:
            for rp in self.recomps:
                if t in self.srcs[rp]:
                    self.replace(rp, t)
                    count += 1
            self.recomps.append(t)
        else:
            self.swaps.append(t)
        for cand in range(len(self.candidates)):
            if cand in self.recomps or cand in self.swaps:
                continue
            if t in self.srcs[cand] and self.gone(t, cand):
                self.replace(cand, t)
                self.total[cand] = self.time[cand]
                for rp in self.recomps:
                    if cand in self.srcs[rp]:
                        self.total[cand] += self.time[cand]
            if choice == RECOMPUTE and cand in self.srcs[t]:
                self.total[cand] = count * self.time[cand]
        return count


@st.composite
def _candidates(draw: st.DrawFn, chain: bool = False) -> list[Candidate]:
    count = draw(st.integers(1, 9))
    found = []
    for i in range(count):
        before = list(range(i))
        some = st.lists(st.sampled_from(before), max_size=3, unique=True) if i else st.just([])
        sources = ([i - 1] if i else []) if chain else sorted(draw(some))
        # A tensor made of another is used before it in backward, more often than not.
        first = 10 * (count - i) + draw(st.integers(-12, 12)) * (not chain) + 20
        length = 0 if chain else draw(st.integers(0, 25))
        seconds: float = draw(st.integers(0, 64)) / 8
        if not chain and draw(st.integers(0, 9)) == 0:
            seconds = NEVER_S
        found.append(Candidate(f"t{i}", 8, i, first, first + length, seconds, tuple(sources), 1.0))
    return found


def _decide(data: st.DataObject, lineage: Lineage) -> list[tuple[int, str, int]]:
    """Random decisions about some of the candidates, with the count of each."""
    taken = []
    for _ in range(data.draw(st.integers(0, len(lineage.candidates)))):
        number = data.draw(st.sampled_from(list(lineage.remaining)))
        able = math.isfinite(lineage.total_s[number])
        if able and data.draw(st.booleans()):
            lineage.recompute(number)
            taken.append((number, RECOMPUTE, lineage.recompute_count[number]))
        else:
            lineage.swap(number)
            taken.append((number, SWAP, 1))
    return taken


@given(_candidates(), st.data())
def test_sources_seconds_and_totals_are_those_of_the_plain_rules(
    candidates: list[Candidate], data: st.DataObject
) -> None:
    lineage = Lineage(candidates)
    plain = _Plain(candidates)
    for number, choice, count in _decide(data, lineage):
        assert plain.choose(number, choice) == count
    for number in range(len(candidates)):
        if lineage.choice[number] == SWAP:
            continue
        assert lineage.sources[number] == plain.srcs[number]
        assert lineage.recompute_s[number] == pytest.approx(plain.time[number])
        assert lineage.total_s[number] == pytest.approx(plain.total[number])


@given(_candidates(), st.data())
def test_the_sources_of_every_recomputation_are_there_when_it_runs(
    candidates: list[Candidate], data: st.DataObject
) -> None:
    lineage = Lineage(candidates)
    _decide(data, lineage)
    for number, choice in enumerate(lineage.choice):
        if choice != RECOMPUTE:
            continue
        assert math.isfinite(lineage.recompute_s[number])
        at = candidates[number].first_backward
        for source in lineage.sources[number]:
            if lineage.choice[source] == RETAINED:
                continue
            first, last = lineage.live(source)
            assert first <= at <= last
            assert lineage.choice[source] == RECOMPUTE or lineage.due(source) <= at


@given(_candidates(chain=True), st.data())
def test_in_a_chain_seconds_are_those_of_all_between_two_that_are_kept(
    candidates: list[Candidate], data: st.DataObject
) -> None:
    """Reckoned from scratch: walk back from a tensor to the first that is there."""
    lineage = Lineage(candidates)
    for _ in range(data.draw(st.integers(0, len(candidates)))):
        lineage.recompute(data.draw(st.sampled_from(list(lineage.remaining))))
    for number in range(len(candidates)):
        seconds, at = candidates[number].recompute_s, number - 1
        while at >= 0 and lineage.choice[at] == RECOMPUTE:
            seconds += candidates[at].recompute_s
            at -= 1
        assert lineage.recompute_s[number] == pytest.approx(seconds)
        assert lineage.sources[number] == ({at} if at >= 0 else set())
        readers = sum(number in lineage.sources[n] for n in range(len(candidates)))
        if lineage.choice[number] == RECOMPUTE:
            assert readers == 0
