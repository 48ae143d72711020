"""Garbage is collected as ever, among fewer objects."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

import memfit
from memfit.measure.garbage import only_new_garbage


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> Iterator[None]:
    """Nothing is frozen, as the test run has it, and garbage is only collected when asked for."""
    gc.unfreeze()
    gc.disable()
    yield
    gc.enable()
    gc.freeze()


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


def _left_behind() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


def test_what_was_garbage_before_is_gone_and_what_becomes_it_is_found() -> None:
    before = _left_behind()
    with only_new_garbage():
        assert before() is None
        within = _left_behind()
        gc.collect()
        assert within() is None


def test_what_is_there_is_passed_over_until_the_block_ends() -> None:
    kept = [Cycle()]
    reference = weakref.ref(kept[0])
    with only_new_garbage():
        assert gc.get_freeze_count() > 10_000
        kept.clear()
        gc.collect()
        assert reference() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert reference() is None


def test_the_outermost_block_counts_also_where_it_fails() -> None:
    with pytest.raises(ZeroDivisionError), only_new_garbage():
        with only_new_garbage():
            pass
        assert gc.get_freeze_count()
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


def test_what_others_have_frozen_stays_so() -> None:
    gc.freeze()
    before = _left_behind()
    with only_new_garbage():
        assert before() is not None
    assert gc.get_freeze_count()


def test_a_fit_leaves_nothing_frozen(zoo: SimpleNamespace) -> None:
    seen: list[int] = []

    def look(_: str) -> None:
        seen.append(gc.get_freeze_count())

    memfit.fit_workload(zoo.workload(zoo.Stack), "90%", steps=1, progress=look).undo()
    assert min(seen) > 10_000 and gc.get_freeze_count() == 0
