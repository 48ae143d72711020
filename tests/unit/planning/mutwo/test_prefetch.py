"""Algorithm C by hand: where copies back start, and what they add."""

from __future__ import annotations

import pytest

from memfit.planning.mutwo.prefetch import Prefetches, Want
from memfit.planning.mutwo.step import Step

FORWARD = 4
BACKWARD = (2.0, 3.0, 4.0, 5.0, 6.0)  # ranks 4 to 8, which begin at 0, 2, 5, 9 and 14


def _prefetches() -> Prefetches:
    return Prefetches(Step((1.0,) * FORWARD + BACKWARD, FORWARD, ()))


def test_a_copy_hides_behind_the_operators_before_its_use() -> None:
    found = _prefetches().overhead(Want(6.0, due=7))
    assert (found.overhead_s, found.start_s, found.end_s) == (0.0, 3.0, 9.0)
    assert found.prompt == 5, "it needs all of rank 6 and two seconds of rank 5"


def test_a_copy_that_just_fits_starts_with_the_operator() -> None:
    found = _prefetches().overhead(Want(7.0, due=7))
    assert (found.overhead_s, found.prompt) == (0.0, 5)


def test_what_the_backward_before_is_too_short_for_is_left() -> None:
    found = _prefetches().overhead(Want(7.0, due=6))
    assert (found.overhead_s, found.prompt) == (2.0, 4), "ranks 4 and 5 hide five seconds"


def test_the_walk_ends_where_memory_is_over_the_limit() -> None:
    prefetches = _prefetches()
    prefetches.place({}, ((4, 5),), ())
    found = prefetches.overhead(Want(6.0, due=7))
    assert (found.overhead_s, found.prompt) == (2.0, 6), "only rank 6 hides it"


def test_inside_the_peak_nothing_hides() -> None:
    prefetches = _prefetches()
    prefetches.place({}, ((4, 7),), ())
    found = prefetches.overhead(Want(3.0, due=7))
    assert (found.overhead_s, found.prompt, found.start_s) == (3.0, 7, 9.0)


def test_right_behind_the_peak_nothing_hides_either() -> None:
    prefetches = _prefetches()
    prefetches.place({}, ((5, 6),), ())
    found = prefetches.overhead(Want(3.0, due=7))
    assert (found.overhead_s, found.prompt) == (3.0, 7)


def test_before_the_peak_there_is_room() -> None:
    prefetches = _prefetches()
    prefetches.place({}, ((7, 8),), ())
    assert prefetches.overhead(Want(4.0, due=6)).overhead_s == 0.0


def test_a_peak_in_the_forward_bars_nothing() -> None:
    prefetches = _prefetches()
    prefetches.place({}, ((0, 3),), ())
    assert prefetches.overhead(Want(4.0, due=6)).overhead_s == 0.0


def test_a_copy_due_while_another_runs_goes_before_it() -> None:
    prefetches = _prefetches()
    first = prefetches.add(Want(8.0, due=8))
    assert (first.start_s, first.prompt) == (6.0, 6)
    second = prefetches.add(Want(3.0, due=7))  # due at 9, while the first one runs
    assert (second.overhead_s, second.end_s, second.start_s, second.prompt) == (0.0, 6.0, 3.0, 5)


def test_what_a_copy_leaves_of_an_operator_is_there_for_the_next() -> None:
    prefetches = _prefetches()
    prefetches.add(Want(1.0, due=8))
    second = prefetches.add(Want(3.0, due=8))
    assert (second.prompt, second.start_s) == (7, 10.0), "both run beside rank 7"


def test_copies_due_one_after_the_other_do_not_meet() -> None:
    prefetches = _prefetches()
    prefetches.add(Want(5.0, due=8))
    second = prefetches.add(Want(4.0, due=7))
    assert (second.end_s, second.start_s, second.overhead_s) == (9.0, 5.0, 0.0)


def test_in_the_peak_the_rest_of_a_copy_under_way_is_waited_for() -> None:
    """The first copy runs from 5, where the peak ends, to 14; the second is due at 9."""
    prefetches = _prefetches()
    prefetches.place({}, ((4, 5),), ())
    first = prefetches.add(Want(9.0, due=8))
    assert (first.start_s, first.overhead_s) == (5.0, 0.0)
    second = prefetches.overhead(Want(3.0, due=7))
    assert (second.overhead_s, second.prompt) == (3.0 + 5.0, 7)


def test_a_wait_that_another_copy_has_already_is_not_charged_again() -> None:
    prefetches = _prefetches()
    prefetches.place({}, ((4, 8),), ())
    assert prefetches.add(Want(3.0, due=7)).overhead_s == 3.0
    assert prefetches.add(Want(2.0, due=7)).overhead_s == 2.0


def test_recomputation_before_the_use_hides_a_copy_even_in_the_peak() -> None:
    prefetches = _prefetches()
    prefetches.place({7: 2.0}, ((4, 7),), ())
    found = prefetches.overhead(Want(3.0, due=7))
    assert (found.overhead_s, found.prompt) == (1.0, 7)


def test_recomputation_on_the_way_back_hides_a_copy() -> None:
    prefetches = _prefetches()
    assert prefetches.overhead(Want(8.0, due=7)).prompt == 4
    prefetches.place({6: 2.0}, (), ())
    found = prefetches.overhead(Want(8.0, due=7))
    assert (found.overhead_s, found.prompt) == (0.0, 5), "ranks 5 and 6 now take nine seconds"


def test_recomputation_that_reads_the_tensor_does_not_hide_its_copy() -> None:
    prefetches = _prefetches()
    prefetches.place({7: 2.0}, ((4, 6),), ())
    assert prefetches.overhead(Want(3.0, due=7)).overhead_s == 1.0
    assert prefetches.overhead(Want(3.0, due=7, before_recompute=True)).overhead_s == 3.0


def test_placing_again_gives_what_adding_one_by_one_gave() -> None:
    wants = [Want(2.0, 8), Want(4.0, 8), Want(1.0, 6), Want(3.0, 7)]
    prefetches = _prefetches()
    prefetches.place({5: 1.0}, ((4, 4),), ())
    added = [prefetches.add(want) for want in wants]
    assert prefetches.place({5: 1.0}, ((4, 4),), wants) == added


@pytest.mark.parametrize("due", [4, 6, 8])
def test_a_copy_that_takes_no_time_adds_none(due: int) -> None:
    prefetches = _prefetches()
    prefetches.place({}, ((4, 8),), ())
    found = prefetches.overhead(Want(0.0, due))
    assert (found.overhead_s, found.prompt) == (0.0, due)
