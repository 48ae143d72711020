"""How many bytes the CUDA allocator must be allowed for a step: its own placement, simulated.

Follows torch's caching allocator with expandable segments: requests up to 1 MiB and larger ones
have a segment each that grows by pages; a request takes the smallest free block it fits in, lowest
address first, and splits it; freed neighbours merge; what is mapped stays mapped. Before a segment
grows, what is held already and the whole request must be under the cap together, even where the
request then begins in free bytes. Limits: one stream, and a start laid out as when it was profiled
(see `settle_optimizer_state`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache

import numpy as np

from memfit.ir.joint_graph import Span, Variant
from memfit.ir.profile import LARGE_PAGE, SMALL_PAGE, Placed
from memfit.planning.acts import Act, Ints, Pick, Run
from memfit.planning.simulate import Simulator

MIB = 2**20
SMALL_REQUEST, MIDDLING_REQUEST = MIB, 10 * MIB
_NEVER_ENDING = 2**62

# What is allocated: (block, the call whose replay makes it, -1: the original), or a part of a pick.
Key = tuple[object, ...]
MODEL_ENDS: Key = ("model ends", -1)  # stands in the sequence where the model's forward is over


def reserved_bytes(simulator: Simulator, acts: Sequence[Act], trim: bool = False) -> int | None:
    """The lowest cap under which the allocator has room for the step; None where it is not known.

    With `trim`, it gives its free pages back when the model's forward ends.
    """
    start = simulator.profile.allocator
    if start is None:
        return None
    holes = start.holes
    small = _Segment(SMALL_PAGE, start.small, [h for h in holes if h <= SMALL_REQUEST])
    large = _Segment(LARGE_PAGE, start.large, [h for h in holes if h > SMALL_REQUEST])
    places: dict[Key, tuple[_Segment, int]] = {}
    highest = 0
    for key, size in allocation_sequence(simulator, acts):
        if size > 0:
            segment = small if size <= SMALL_REQUEST else large
            assert key not in places, f"{key} is there already"
            before = segment.mapped
            places[key] = (segment, segment.take(size))
            if (more := segment.mapped - before) > 0:
                after = small.mapped + large.mapped
                highest = max(highest, after, after - more + _asked_for(size))
        elif size < 0:
            segment, address = places.pop(key)
            segment.give(address, -size)
        elif trim and key == MODEL_ENDS:
            small.trim()
            large.trim()
    return start.reserved_bytes + highest


def _asked_for(size: int) -> int:
    """What the allocator counts for a request that its free blocks have no room for."""
    if size < MIDDLING_REQUEST:
        return SMALL_PAGE if size <= SMALL_REQUEST else LARGE_PAGE
    return -(-size // SMALL_PAGE) * SMALL_PAGE


def allocation_sequence(simulator: Simulator, acts: Sequence[Act]) -> Iterator[tuple[Key, int]]:
    """The step's allocations (positive bytes) and frees (negative) in order, acts included."""
    sim = simulator
    length = sim.graph.length
    passes = [part for act in acts if isinstance(act, Pick) for part in _passes(sim, act)]
    placed = {block for part in passes for block in part.blocks.values()}
    # At one position frees come before acts, acts before allocations. What comes back is there
    # before the backward that it was brought for, or that it is brought beside.
    moments: list[tuple[int, float, Key, int]] = [(sim.graph.model_end, 3, MODEL_ENDS, 0)]
    spans = (sim.birth.tolist(), sim.deaths(acts).tolist(), sim.bytes.tolist())
    for block, (birth, death, size) in enumerate(zip(*spans, strict=True)):
        if death <= birth:
            continue  # never made
        if block not in placed:
            moments.append((birth, 2, (block, -1), size))
        if death < length:
            moments.append((death, 0, (block, -1), -size))
    inside: dict[Key, Sequence[tuple[Key, int]]] = {}
    for number, part in enumerate(passes):
        inside["pass", number] = part.sequence
        moments.append((part.position, 1, ("pass", number), 0))
    moments += _copied(sim, acts)
    for act in acts:
        effect = sim.effect(act)
        if not isinstance(act, tuple) or not effect.inside:
            continue  # nothing is replayed
        inside["run", act[0]] = _replayed(sim, act)
        moments.append((effect.need, 1, ("run", act[0]), 0))
        for block, release in zip(effect.blocks, effect.releases, strict=True):
            moments.append((int(release), 0, (int(block), act[0]), -int(sim.bytes[block])))
    moments.sort(key=lambda m: (m[0], m[1]))
    for _, order, what, size in moments:
        if order == 1:
            yield from inside[what]
        else:
            yield what, size


def _copied(sim: Simulator, acts: Sequence[Act]) -> Iterator[tuple[int, float, Key, int]]:
    """What goes to the host and comes back: blocks of the step, and picks' own storages."""
    for block, (returns, release) in sim.copied_back(acts).items():
        size = int(sim.bytes[block])
        yield returns, 0.5, (block, "back"), size
        yield release, 0, (block, "back"), -size
    for act in acts:
        away = sim.effect(act).away
        if away is None or not isinstance(act, Pick):
            continue
        for storage, size in _moved_storages(sim, act):
            yield away.leaves, 0, ("own", act.call, storage), -size
            yield away.returns, 0.5, ("own", act.call, storage), size


def _moved_storages(sim: Simulator, pick: Pick) -> list[tuple[int, int]]:
    """The storages of a pick's own that it moves, as its passes number them, with their bytes.

    A variant that was recorded numbers its storages by itself: they are found by their bytes.
    """
    variant = sim.variant(pick)
    graph = sim.profile.graphs[sim.graph.calls[pick.call].graph]
    wanted = {s for n in variant.moved for s in graph.nodes[n].storages}
    own = _own_storages(variant)
    if not variant.measured:
        return [(s, size) for s, size in own.items() if s in wanted]
    sizes = sorted(graph.storages[s].bytes for s in wanted)
    found = []
    for storage, size in own.items():
        near = next((s for s in sizes if s <= size < s + 512), None)
        if near is not None:
            sizes.remove(near)
            found.append((storage, size))
    return found


def _own_storages(variant: Variant) -> dict[int, int]:
    """What a variant hands from forward to backward by itself, with its bytes."""
    stays = {s.storage: s.bytes for s in variant.forward if s.death == -1}
    taken = {s.storage for s in variant.backward if s.birth == -1}
    return {storage: size for storage, size in stays.items() if storage in taken}


class _Pass:
    """What one graph of a picked variant allocates and frees, where it runs in the step.

    `own` storages are handed from forward to backward. Other spans that stay when the pass ends
    are the step's own blocks, matched by size in order.
    """

    def __init__(
        self,
        call: int,
        position: int,
        spans: Sequence[Span],
        own: set[int],
        leaving: Sequence[tuple[int, int]],
    ) -> None:
        self.call, self.position = call, position
        self.spans, self.own = spans, own
        self.blocks: dict[int, int] = {}  # span -> the block of the step it stands for
        waiting = list(leaving)
        for number, span in enumerate(spans):
            if span.birth >= 0 and span.death == -1 and span.storage not in own:
                found = next((c for c in waiting if c[1] == span.bytes), None)
                if found is not None:
                    waiting.remove(found)
                    self.blocks[number] = found[0]

    @cached_property
    def sequence(self) -> Sequence[tuple[Key, int]]:
        """Allocations and frees in the order of the pass."""
        moments: list[tuple[int, int, Key, int]] = []
        for number, span in enumerate(self.spans):
            if number in self.blocks:
                moments.append((span.birth, 1, (self.blocks[number], -1), span.bytes))
                continue
            handed = span.storage in self.own and -1 in (span.birth, span.death)
            if not handed and -1 in (span.birth, span.death):
                continue  # a tangent, or a gradient that is added to one there
            key: Key = ("here", self.position, number)
            if handed:
                key = ("own", self.call, span.storage)
            if span.birth >= 0:
                moments.append((span.birth, 1, key, span.bytes))
            if span.death >= 0:
                moments.append((span.death, 0, key, -span.bytes))
        moments.sort(key=lambda m: (m[0], m[1]))
        return [(key, size) for _, _, key, size in moments]


@lru_cache(maxsize=4096)
def _passes(sim: Simulator, pick: Pick) -> tuple[_Pass, _Pass]:
    call, variant = sim.graph.calls[pick.call], sim.variant(pick)
    own = set(_own_storages(variant))
    made = (sim.call == call.index) & (sim.death > call.exit)
    left = (sim.birth > call.need) & (sim.birth < call.finish) & (sim.death > call.finish)

    def sizes(blocks: Ints) -> list[tuple[int, int]]:
        return [(int(b), int(sim.bytes[b])) for b in np.flatnonzero(blocks)]

    return (
        _Pass(pick.call, call.enter, variant.forward, own, sizes(made)),
        _Pass(pick.call, call.need, variant.backward, own, sizes(left)),
    )


@lru_cache(maxsize=4096)
def _replayed(sim: Simulator, run: Run) -> Sequence[tuple[Key, int]]:
    """Allocations and frees of a replay in their order."""
    survivors = set(sim.effect(run).blocks.tolist())
    calls = sim.graph.calls[run[0] : run[1] + 1]
    stop = max(c.stop for c in calls)
    own = np.flatnonzero((sim.call >= run[0]) & (sim.call <= run[1]) & (sim.birth <= stop))
    mine = set(own.tolist())
    found: list[tuple[Key, int]] = []
    for block in sorted(survivors - mine):
        found.append(((block, run[0]), int(sim.bytes[block])))
    moments = []
    for block in own.tolist():
        moments.append((int(sim.birth[block]), 1, block))
        if block not in survivors:
            moments.append((min(int(sim.death[block]), stop + 1), 0, block))
    for _, made, block in sorted(moments):
        size = int(sim.bytes[block])
        found.append(((block, run[0]), size if made else -size))
    return found


class _Segment:
    """An expandable segment: free blocks by size, neighbours by address, unmapped pages."""

    def __init__(self, page: int, layout: Sequence[Placed], holes: Sequence[int]) -> None:
        self.page = page
        self.mapped = 0  # pages more than at the start
        self._top = 0  # addresses from here on were never used
        self._free: list[tuple[int, int]] = []  # (size, address), sorted
        self._size_at: dict[int, int] = {}  # free block by its first address
        self._start_of: dict[int, int] = {}  # and by the address after its end
        self._unmapped: dict[int, int] = {}  # address -> size of pages given back
        for placed in layout:
            if placed.address > self._top:
                self._unmapped[self._top] = placed.address - self._top
            if placed.free:
                self._add(placed.address, placed.bytes)
            self._top = placed.address + placed.bytes
        below = 0
        for hole in holes:  # elsewhere: apart from each other and the rest
            below -= hole + 1
            self._add(below, hole)

    def take(self, size: int) -> int:
        """Place `size` bytes and return their address."""
        at = bisect_left(self._free, (size, -(2**62)))
        if at < len(self._free):
            found, address = self._free.pop(self._best(at))
            del self._size_at[address]
            del self._start_of[address + found]
        else:
            address, found = self._map(size)
        if found > size:
            self._add(address + size, found - size)
        return address

    def _best(self, at: int) -> int:
        """From the smallest block that fits on: a block counts with the room it could grow by."""
        size, address = self._free[at]
        if not self._unmapped:  # then only what ends at the top could grow, and goes last
            last = address + size == self._top and at + 1 < len(self._free)
            return at + 1 if last else at
        best, room = at, self._room(self._free[at])
        for larger in range(at + 1, len(self._free)):
            if (more := self._room(self._free[larger])) >= room:
                break
            best, room = larger, more
        return best

    def _room(self, block: tuple[int, int]) -> int:
        size, address = block
        end = address + size
        while end in self._unmapped:
            end += self._unmapped[end]
        return _NEVER_ENDING if end == self._top else end - address

    def give(self, address: int, size: int) -> None:
        """Free what `take` placed."""
        before = self._start_of.get(address)
        if before is not None:
            size += self._remove(before)
            address = before
        if address + size in self._size_at:
            size += self._remove(address + size)
        self._add(address, size)

    def trim(self) -> None:
        """Give whole free pages back."""
        for size, address in [block for block in self._free if block[1] >= 0]:
            first = -(-address // self.page) * self.page
            last = (address + size) // self.page * self.page
            if last <= first:
                continue
            self._remove(address)
            if first > address:
                self._add(address, first - address)
            if address + size > last:
                self._add(last, address + size - last)
            self.mapped -= last - first
            self._unmapped[first] = last - first

    def _map(self, size: int) -> tuple[int, int]:
        """Map pages at the lowest address with room for `size`; return the block they make."""
        for hole in [*sorted(self._unmapped), self._top]:
            start = self._start_of.get(hole, hole)
            end = start
            while end - start < size and end != self._top:
                step = self._unmapped.get(end) or self._size_at.get(end)
                if step is None:
                    break
                end += step
            if end - start >= size or end == self._top:
                return start, self._map_range(start, size)
        raise AssertionError("there is always room at the top")

    def _map_range(self, start: int, size: int) -> int:
        at = start
        while at < start + size:
            if at in self._size_at:
                at += self._remove(at)
                continue
            hole = self._unmapped.pop(at, None)
            wanted = -(-(start + size - at) // self.page) * self.page
            pages = wanted if hole is None else min(hole, wanted)
            if hole is None:
                self._top = at + pages
            elif hole > pages:
                self._unmapped[at + pages] = hole - pages
            self.mapped += pages
            at += pages
        if at in self._size_at:  # new pages merge with the free block after them
            at += self._remove(at)
        return at - start

    def _add(self, address: int, size: int) -> None:
        insort(self._free, (size, address))
        self._size_at[address] = size
        self._start_of[address + size] = address

    def _remove(self, address: int) -> int:
        size = self._size_at.pop(address)
        del self._start_of[address + size]
        del self._free[bisect_left(self._free, (size, address))]
        return size
