"""Slots never overlap, free ones become whole again, what cannot be had is said with numbers."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import HostMemoryError
from memfit.runtime.swap import arena as arena_module
from memfit.runtime.swap import host_memory
from memfit.runtime.swap.arena import GRAIN, Arena, Slot, default_host_budget, free_host_bytes


@dataclass
class Token:
    number: int


def test_a_slot_has_the_size_asked_for_and_keeps_what_is_written() -> None:
    arena = Arena(10 * GRAIN, pinned=False)
    first, second = arena.take(700), arena.take(GRAIN)
    assert first.view.dtype is torch.uint8 and first.view.shape == (700,)
    first.view.fill_(1)
    second.view.fill_(2)
    assert first.view.eq(1).all() and second.view.eq(2).all()
    assert arena.used_bytes == arena.highest_bytes == 3 * GRAIN
    assert arena.capacity_bytes == 10 * GRAIN


def test_memory_starts_at_a_page_and_is_not_rounded_up() -> None:
    arena = Arena(3 * 2**20 + GRAIN, pinned=False)
    assert arena.capacity_bytes == 3 * 2**20 + GRAIN
    assert arena.take(1).view.data_ptr() % 4096 == 0


def test_a_free_slot_is_used_again_after_the_copy_that_read_it() -> None:
    arena = Arena(2 * GRAIN, pinned=False)
    slot, token = arena.take(GRAIN), Token(1)
    assert slot.after is None
    arena.give(slot, token)
    assert arena.used_bytes == 0
    assert arena.take(GRAIN).after is token


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_free_neighbours_become_one_that_waits_for_the_latest_copy(order: tuple[int, ...]) -> None:
    arena = Arena(3 * GRAIN, pinned=False)
    slots = [arena.take(GRAIN) for _ in range(3)]
    tokens = [Token(5), Token(9), Token(7)]
    for i in order:
        arena.give(slots[i], tokens[i])
    whole = arena.take(3 * GRAIN)
    assert whole.after is tokens[1]


def test_a_full_arena_says_what_is_missing() -> None:
    arena = Arena(4 * GRAIN, pinned=False)
    slots = [arena.take(GRAIN) for _ in range(4)]
    arena.give(slots[0], None)
    arena.give(slots[2], None)
    with pytest.raises(
        HostMemoryError, match=r"1\.00 KiB .*1\.00 KiB of 2\.00 KiB.*512 B"
    ) as error:
        arena.take(2 * GRAIN)
    assert error.value.hint and "host_budget" in error.value.hint
    assert error.value.exit_code == 4


def test_slots_that_garbage_holds_are_not_missing() -> None:
    arena = Arena(2 * GRAIN, pinned=False)

    class Failed:
        """A step whose error refers to itself, as errors with their frames do."""

        def __init__(self) -> None:
            self.itself, self.slot = self, arena.take(2 * GRAIN)

        def __del__(self) -> None:
            arena.give(self.slot, None)

    gc.disable()
    try:
        Failed()
        assert arena.used_bytes == 2 * GRAIN
        assert arena.take(2 * GRAIN).view.numel() == 2 * GRAIN
    finally:
        gc.enable()


def test_growing_adds_a_chunk() -> None:
    arena = Arena(0, pinned=False)
    with pytest.raises(HostMemoryError):
        arena.take(1)
    arena.grow(GRAIN)
    arena.grow(3 * GRAIN)
    small, large = arena.take(GRAIN), arena.take(3 * GRAIN)
    assert arena.capacity_bytes == arena.used_bytes == 4 * GRAIN
    arena.give(large, None)
    arena.give(small, None)
    assert arena.used_bytes == 0 and arena.highest_bytes == 4 * GRAIN


def test_growing_to_a_size_leaves_one_chunk_where_nothing_is_taken() -> None:
    arena = Arena(3 * GRAIN, pinned=False)
    arena.grow_to(2 * GRAIN)
    assert arena.capacity_bytes == 3 * GRAIN
    arena.grow_to(5 * GRAIN - 1)
    assert arena.capacity_bytes == 5 * GRAIN
    whole = arena.take(5 * GRAIN)
    arena.grow_to(7 * GRAIN)
    assert arena.capacity_bytes == 7 * GRAIN and whole.chunk == 0
    assert arena.take(2 * GRAIN).chunk == 1, "what is taken stays where it is"


def test_an_arena_that_cannot_grow_has_what_it_had() -> None:
    arena = Arena(3 * GRAIN, pinned=False)
    for held in ([], [arena.take(GRAIN)]):
        with pytest.raises(HostMemoryError):
            arena.grow_to(2**50)
        assert arena.capacity_bytes == 3 * GRAIN
        del held
    assert arena.take(2 * GRAIN)


def test_growing_had_the_old_memory_beside_the_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there was no room for both there was none at all in the end."""
    made: list[tuple[weakref.ref[torch.Tensor], int]] = []
    mapped = arena_module._mapped

    def limited(size: int) -> torch.Tensor:
        if size + sum(n for memory, n in made if memory() is not None) > 7 * GRAIN:
            raise HostMemoryError("no more memory", hint="none")
        memory = mapped(size)
        made.append((weakref.ref(memory), size))
        return memory

    monkeypatch.setattr(arena_module, "_mapped", limited)
    arena = Arena(4 * GRAIN, pinned=False)
    arena.grow_to(5 * GRAIN)
    assert arena.capacity_bytes == 5 * GRAIN
    with pytest.raises(HostMemoryError, match="no more memory"):
        arena.grow_to(8 * GRAIN)
    assert arena.capacity_bytes == 5 * GRAIN
    assert arena.take(5 * GRAIN)


def test_more_than_the_machine_has_is_refused_before_it_is_touched() -> None:
    with pytest.raises(HostMemoryError, match=r"1024\.00 TiB .* are free") as error:
        Arena(2**50, pinned=False)
    assert error.value.hint and "host_budget" in error.value.hint


def test_pinning_refused_says_what_the_system_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            return 2

        def cudaGetErrorString(self, error: int) -> str:
            return "out of memory"

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(arena_module, "_clear_last_error", lambda: None)
    with pytest.raises(HostMemoryError, match=r"pin 1\.00 MiB .*'out of memory'") as error:
        Arena(2**20, pinned=True)
    assert error.value.hint and "ulimit -l" in error.value.hint


def test_pinned_memory_is_unpinned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            calls.append(("pin", address))
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            calls.append(("unpin", address))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(arena_module, "_wait_for_copies", lambda: None)
    arena = Arena(GRAIN, pinned=True)
    arena.close()
    arena.close()
    del arena
    assert [name for name, _ in calls] == ["pin", "unpin"]
    assert calls[0][1] == calls[1][1]


def test_memory_was_unpinned_while_another_device_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the current device was waited for."""
    waited: list[int | None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "memory_reserved", [2**20, 2**20, 0, 2**20].__getitem__)
    arena = Arena(GRAIN, pinned=False)
    arena._chunks[0].pinned = True
    monkeypatch.setattr(arena_module, "_unpin", lambda address: waited.append(-1))
    arena.close()
    assert waited == [None, 0, 3, -1], "nobody waits for device 2, which would get a context"


def test_closing_lets_go_of_the_memory() -> None:
    arena = Arena(GRAIN, pinned=False)
    slot = arena.take(1)
    memory = weakref.ref(arena._chunks[0].memory)
    arena.close()
    arena.give(slot, None)  # a late finalizer
    del slot
    gc.collect()
    assert memory() is None
    assert arena.capacity_bytes == arena.used_bytes == 0


def test_a_slot_given_back_while_the_arena_is_busy_waits_in_line() -> None:
    """A finalizer may run inside `take` itself, in the same thread."""
    arena = Arena(GRAIN, pinned=False)
    slot = arena.take(1)
    with arena._lock:
        arena.give(slot, None)
    assert arena.take(GRAIN).start == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9 * GRAIN), st.integers(0, 99))))
def test_random_use_never_overlaps_and_loses_nothing(moves: list[tuple[bool, int, int]]) -> None:
    arena = Arena(32 * GRAIN, pinned=False)
    arena.grow(16 * GRAIN)
    taken: list[Slot] = []
    for number, (take, size, choice) in enumerate(moves):
        if take:
            try:
                taken.append(arena.take(size))
            except HostMemoryError:
                continue
        elif taken:
            arena.give(taken.pop(choice % len(taken)), Token(number))
        pieces = sorted((s.chunk, s.start, s.stop) for s in taken)
        for (chunk, _, stop), (other, start, _) in pairwise(pieces):
            assert chunk != other or stop <= start
        assert arena.used_bytes == sum(s.stop - s.start for s in taken)
    for slot in taken:
        arena.give(slot, None)
    assert arena.used_bytes == 0
    assert arena.take(32 * GRAIN) and arena.take(16 * GRAIN)


def test_the_default_is_a_safe_share_of_free_memory() -> None:
    assert 0 < default_host_budget() < free_host_bytes()


def test_the_limit_of_a_control_group_counts(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("100\n")
    outer = inner.parent
    (outer / "memory.max").write_text("1000\n")
    (outer / "memory.current").write_text("400\n")
    (outer / "memory.stat").write_text("anon 300\ninactive_file 50\n")
    assert list(host_memory._cgroup_free(tmp_path, "outer/inner")) == [650]
    older = tmp_path / "memory"
    older.mkdir()
    (older / "memory.limit_in_bytes").write_text("5000\n")
    (older / "memory.usage_in_bytes").write_text("1000\n")
    assert list(host_memory._cgroup_free(tmp_path, "")) == [4000]


def test_an_arena_that_outlives_its_module_ends_in_silence() -> None:
    arena = Arena(GRAIN, pinned=False)
    names = vars(arena_module)
    before = dict(names)
    try:
        names["sys"] = None  # as at the end of a process
        arena.__del__()
    finally:
        names.update(before)
    assert arena.capacity_bytes == 0
