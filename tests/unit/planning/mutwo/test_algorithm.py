"""Algorithm B on toy steps: known best answers, ties, bandwidths, and that it ends."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.planning.mutwo.algorithm import Simulate, decide
from memfit.planning.mutwo.step import (
    NEVER_S,
    RECOMPUTE,
    RETAINED,
    SWAP,
    Candidate,
    Decision,
    Step,
    Usage,
    merged,
)


def _step(
    sizes: Sequence[int],
    recompute_s: Sequence[float],
    swap_s: Sequence[float],
    operator_s: float = 1.0,
) -> Step:
    """A chain of layers: one forward and one backward operator each, which share its tensor."""
    count = len(sizes)
    return Step(
        seconds=(operator_s,) * (2 * count),
        backward=count,
        candidates=tuple(
            Candidate(
                name=f"layers.{i}",
                bytes=sizes[i],
                last_forward=i,
                first_backward=2 * count - 1 - i,
                last_backward=2 * count - 1 - i,
                recompute_s=recompute_s[i],
                sources=(i - 1,) if i else (),
                swap_s=swap_s[i],
            )
            for i in range(count)
        ),
    )


def _memory(step: Step, limit: int | None = None) -> Simulate:
    """All that waits at each backward operator: a plain Algorithm G."""

    def simulate(decisions: Sequence[Decision]) -> Usage:
        gone = {d.candidate: d for d in decisions}
        ranks = range(step.backward, len(step.seconds))
        held = []
        for rank in ranks:
            there = 0
            for number, candidate in enumerate(step.candidates):
                start = 0
                if number in gone:
                    prompt = gone[number].prompt
                    start = candidate.first_backward if prompt is None else prompt
                if start <= rank <= candidate.last_backward:
                    there += candidate.bytes
            held.append(there)
        over = [r for r, bytes_ in zip(ranks, held, strict=True) if limit and bytes_ > limit]
        return Usage(max(held), merged((r, r) for r in over))

    return simulate


def _after_forward(step: Step) -> Simulate:
    """All that waits when the forward is over, where no copy is back yet."""

    def simulate(decisions: Sequence[Decision]) -> Usage:
        gone = {d.candidate for d in decisions}
        return Usage(sum(c.bytes for n, c in enumerate(step.candidates) if n not in gone))

    return simulate


def _choices(step: Step, limit: int | None) -> dict[int, str]:
    decisions = decide(step, limit, _memory(step, limit))
    return {d.candidate: d.choice for d in decisions}


def test_a_step_that_fits_is_left_as_it_is() -> None:
    step = _step([4, 4, 4], [1, 1, 1], [1, 1, 1])
    assert set(_choices(step, 12).values()) == {RETAINED}


def test_the_first_tensor_swaps_for_nothing_where_its_copy_hides() -> None:
    step = _step([4, 4, 4], [1, 1, 1], [1, 1, 1])
    decisions = decide(step, 8, _memory(step, 8))
    assert decisions == (
        Decision(0, SWAP, 0.0, prompt=4),
        Decision(1, RETAINED),
        Decision(2, RETAINED),
    )


def test_without_bandwidth_all_is_recomputed() -> None:
    step = _step([4] * 5, [1] * 5, [NEVER_S] * 5)
    assert set(_choices(step, None).values()) == {RECOMPUTE}


def test_with_endless_bandwidth_all_is_swapped() -> None:
    step = _step([4] * 5, [1] * 5, [0.0] * 5)
    assert set(_choices(step, None).values()) == {SWAP}


def test_between_the_two_some_of_each() -> None:
    """Copies as long as three operators: every third hides, the others cost more than a second."""
    step = _step([4] * 9, [1.5] * 9, [3.0] * 9)
    counts = {
        choice: list(_choices(step, 12).values()).count(choice) for choice in (SWAP, RECOMPUTE)
    }
    assert counts[SWAP] > 0 and counts[RECOMPUTE] > 0


def test_the_share_that_is_swapped_grows_with_the_bandwidth() -> None:
    shares = []
    for swap_s in (NEVER_S, 6.0, 3.0, 1.0, 0.0):
        step = _step([4] * 9, [1.5] * 9, [swap_s] * 9)
        shares.append(list(_choices(step, None).values()).count(SWAP))
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 9


def test_what_cannot_be_swapped_nor_recomputed_stays() -> None:
    step = _step([4, 4], [NEVER_S, 1.0], [NEVER_S, NEVER_S])
    assert _choices(step, 1) == {1: RECOMPUTE, 0: RETAINED}


def test_no_more_is_swapped_than_the_host_has_room_for() -> None:
    step = _step([4, 3, 4, 3], [1] * 4, [0.0] * 4)
    decisions = decide(step, None, _memory(step), host_bytes=7 + 2 * 511)  # each rounded up
    swapped = [d.candidate for d in decisions if d.choice == SWAP]
    assert swapped == [0, 1] and sum(d.choice == RECOMPUTE for d in decisions) == 2


def test_a_copy_slows_down_what_runs_beside_it() -> None:
    step = _step([4, 4, 4], [1, 1, 1], [1, 1, 1])
    slow = replace(step, candidates=tuple(replace(c, drag_s=2.0) for c in step.candidates))
    assert SWAP not in _choices(slow, 8).values()


@pytest.mark.parametrize(("limit", "recomputed"), [(24, 0), (23, 1), (20, 1), (12, 3), (0, 6)])
def test_the_limit_ends_it(limit: int, recomputed: int) -> None:
    step = _step([4] * 6, [1] * 6, [NEVER_S] * 6)
    decisions = decide(step, limit, _after_forward(step))
    assert [d.choice for d in decisions].count(RECOMPUTE) == recomputed


def test_of_equals_the_first_goes() -> None:
    step = _step([4] * 4, [1] * 4, [NEVER_S] * 4)
    step = replace(step, candidates=tuple(replace(c, sources=()) for c in step.candidates))
    taken = [d.candidate for d in decide(step, None, _memory(step))]
    assert taken == [0, 1, 2, 3]


def test_the_most_bytes_for_a_second_go_first() -> None:
    step = _step([4, 9, 2], [1, 3, 0.25], [NEVER_S] * 3)
    step = replace(step, candidates=tuple(replace(c, sources=()) for c in step.candidates))
    assert [d.candidate for d in decide(step, None, _memory(step))] == [2, 0, 1]


def test_a_recomputed_source_makes_its_readers_dearer() -> None:
    """c frees as much as d per second until b, of which it is made, is not there any more."""
    candidates = (
        Candidate("b", 12, 0, 9, 9, 1.0),
        Candidate("c", 12, 1, 8, 8, 2.0, (0,)),
        Candidate("d", 12, 2, 7, 7, 2.5),
    )
    step = Step((1.0,) * 10, 4, candidates)
    assert [d.candidate for d in decide(step, None, _memory(step))] == [0, 2, 1]


def test_a_recomputation_that_was_chosen_hides_copies() -> None:
    """The copy takes two seconds, of which the one operator before hides one."""
    candidates = (
        Candidate("swapped", 8, 0, 5, 5, 9.0, (), 2.0),
        Candidate("again", 8, 1, 5, 5, 0.5),
        Candidate("kept", 8, 2, 4, 4, 9.0),
    )
    step = Step((1.0,) * 6, 4, candidates)
    decisions = decide(step, None, _memory(step))
    assert [(d.candidate, d.choice) for d in decisions[:2]] == [(1, RECOMPUTE), (0, SWAP)]
    assert decisions[1].overhead_s == 0.5


def test_prompts_are_refreshed_when_recomputing_gives_more_to_hide_behind() -> None:
    candidates = (
        Candidate("swapped", 8, 0, 7, 7, 9.0, (), 2.0),
        Candidate("again", 8, 1, 6, 6, 1.0),
    )
    step = Step((1.0,) * 8, 4, candidates)
    decisions = decide(step, None, _memory(step))
    assert [(d.candidate, d.prompt) for d in decisions] == [(0, 6), (1, None)]
    once = decide(step, 8, _after_forward(step))
    assert once[0] == Decision(0, SWAP, 0.0, prompt=5)


@pytest.mark.parametrize("limit", [14, 11, 8, 5, 0])
def test_toy_steps_get_the_best_answer_there_is(limit: int) -> None:
    """Two copies hide and then there is no time left: the rest is recomputed, cheapest first."""
    sizes, recompute_s = [3, 3, 3, 3, 2], [2.0, 3.0, 4.0, 1.0, 9.0]
    step = _step(sizes, recompute_s, [2.0, 2.0, 20.0, 20.0, 20.0])
    step = replace(step, candidates=tuple(replace(c, sources=()) for c in step.candidates))
    simulate = _after_forward(step)
    decisions = decide(step, limit, simulate)
    cost_s = [(0.0, 2.0), (0.0, 3.0), (20.0, 4.0), (20.0, 1.0), (20.0, 9.0)]
    best_s = min(
        sum(min(cost_s[n]) for n in group)
        for size in range(6)
        for group in itertools.combinations(range(5), size)
        if simulate([Decision(n, RECOMPUTE) for n in group]).peak_bytes <= limit
    )
    assert sum(d.overhead_s for d in decisions) == best_s


@st.composite
def _steps(draw: st.DrawFn) -> Step:
    count = draw(st.integers(1, 7))
    eighths = st.integers(0, 40).map(lambda n: n / 8)
    maybe = st.one_of(eighths, st.just(NEVER_S))
    step = _step(
        draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)),
        draw(st.lists(maybe, min_size=count, max_size=count)),
        draw(st.lists(maybe, min_size=count, max_size=count)),
    )
    return replace(step, seconds=tuple(draw(eighths) for _ in step.seconds))


@given(_steps(), st.integers(1, 30))
def test_every_step_gets_one_decision_per_tensor_and_always_the_same(
    step: Step, limit: int
) -> None:
    decisions = decide(step, limit, _memory(step, limit))
    assert sorted(d.candidate for d in decisions) == list(range(len(step.candidates)))
    assert decide(step, limit, _memory(step, limit)) == decisions
    taken = [d for d in decisions if d.choice != RETAINED]
    peak_bytes = _memory(step, limit)(taken).peak_bytes
    for decision in decisions:
        candidate = step.candidates[decision.candidate]
        if decision.choice == SWAP:
            assert candidate.swap_s < NEVER_S and decision.prompt is not None
            assert step.backward <= decision.prompt <= candidate.first_backward
        if decision.choice == RETAINED and peak_bytes > limit:
            assert candidate.swap_s == NEVER_S


def test_eight_hundred_tensors_take_seconds() -> None:
    count = 800
    step = _step([4] * count, [1.5] * count, [3.0] * count)
    started = time.perf_counter()
    decisions = decide(step, None, lambda _: Usage(1))
    assert len(decisions) == count
    assert time.perf_counter() - started < 20
