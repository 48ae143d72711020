"""The saved tensors of a training loop: which lie on the device, which in host memory.

Policy. Every storage that autograd saves stands in a queue, the one that was saved last at its
end. When more than the high mark is in use, storages are copied to the host from the front of the
queue, the longest idle first, until what will be left is at most the low mark; then nothing moves
until the high mark is passed again. Only storages that nobody else holds are taken: to move
another one would free nothing. So parameters, buffers, the batch and what the forward still works
with stay, and nobody can change a tensor while it is copied.

A copy frees no memory by being started. The host runs ahead of the device, so to ask whether a
copy is over says little: device memory is let go by telling the computation to wait for the copy.
That is put off while there is room (Marks.ceiling), so that copies run beside the computation.
When everything is to move, one storage as large as the largest may be on its way.

The backward brings a storage back when it asks for it, and with it the ones it is about to ask
for: always one, and more while less than the low mark is in use. Meanwhile only storages that were
saved before it leave.

While memory is far from short nothing is told of what is saved: attention.py says when.

Limits. Between two looks, each after 0.5 % of the capacity was saved, the valve sees nothing: a
single operator that needs more than what lies above the ceiling runs out of memory all the same,
and so does a loop whose parameters, gradients and optimizer state alone are too large. Memory in
use is not what the allocator holds: fragmented free memory is not seen (expandable segments help).
The computation is taken to run on one stream, and not to be captured in a CUDA graph.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import ref

import torch
from torch.autograd.graph import Node

from memfit.errors import HostMemoryError
from memfit.ir.pressure import PressureStatistics
from memfit.ir.swap import Traffic
from memfit.runtime.pressure.away import Away
from memfit.runtime.pressure.eligible import can_be_rebuilt, has_lazy_bits, may_move
from memfit.runtime.pressure.garbage import collected
from memfit.runtime.pressure.gauge import Gauge, Marks, gauge_for, marks_for
from memfit.runtime.pressure.host_store import HostStore
from memfit.runtime.pressure.innards import is_sole_owner, saved_for, storage_key
from memfit.runtime.pressure.saved import Remains, Saved, View
from memfit.runtime.swap.moved import Geometry, Kept, Moved, check_version

log = logging.getLogger(__name__)

Packed = Saved | View | Kept
_TIDY_AT = 1024  # entries of the queue, before storages that died are looked for


@dataclass(frozen=True)
class Settings:
    """What the user asked for. Without `device`, the first large saved tensor decides."""

    threshold: float
    release_at: float
    capacity: int | None
    host_budget: int | None
    min_tensor_bytes: int
    device: torch.device | None


class SavedTensors:
    """Takes tensors from autograd and gives them back; moves them in between when it must.

    `pack` and `unpack` are hooks of torch.autograd. Graphs may outlive the loop: `unpack` works
    after `close`, too, and host memory goes with the last storage that lies there.

    `when_asked` is called before the first tensor is packed after one was asked for: a forward
    begins, or a backward computes something again. `when_told` is called before a tensor is packed.
    """

    when_asked: Callable[[], None] | None = None
    when_told: Callable[[], None] | None = None

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()  # not reentrant: a finalizer must find it taken
        self._open = False
        self._device: torch.device | None = None
        self._gauge: Gauge
        self._marks: Marks
        self._host: HostStore
        self.counts = False
        self._numbers = 0
        self._here: dict[int, ref[Saved]] = {}  # by storage, the longest idle first
        self._tidy_at = _TIDY_AT
        self._leaving: deque[ref[Saved]] = deque()
        self._leaving_bytes = 0
        self._away = Away()
        self._ahead: dict[int, int] = {}  # brought back, not asked for: number -> bytes
        self._gone: deque[Remains] = deque()
        self._allocated = 0  # as last seen, and what happened since
        self._since = 0  # bytes saved or asked for since the last look
        self._largest = 0
        self._last = 0  # the number that was asked for last
        self._asked = False  # since `when_asked` was called
        self._highest = self._highest_lately = self._swaps = self._retrievals = 0
        self.refusals = 0  # copies that host memory had no room for
        self._warned = False

    def open(self) -> None:
        """Begin to move what must."""
        with self._lock:
            self._open = True

    def read_capacity(self) -> None:
        """Ask again how much memory there may be."""
        with self._lock:
            if self._device is not None:
                self._watch(self._device)

    def close(self) -> None:
        """Move nothing from now on; host memory goes as soon as nothing lies there."""
        with self._lock:
            self._open = False
            if self._device is None:
                return
            self._settle()
            for reference in [*self._leaving, *self._here.values()]:
                if (saved := reference()) is not None and saved.tensor is not None:
                    self._stay(saved)
                    saved.moved = None
            self._leaving.clear()
            self._host.close_if_empty()

    def statistics(self) -> PressureStatistics:
        """What was done so far; waits for the copies under way."""
        with self._lock:
            known = self._device is not None
            out, back = self._host.traffic() if known else (Traffic(), Traffic())
            return PressureStatistics(
                self._swaps,
                self._retrievals,
                out,
                back,
                self._highest,
                self._host.highest_bytes if known else 0,
            )

    def in_flight(self) -> int:
        """Copies that were started and are not over."""
        with self._lock:
            return 0 if self._device is None else self._host.in_flight()

    def pack(self, tensor: torch.Tensor) -> Packed:
        """What autograd keeps in the place of a tensor."""
        if self.when_told is not None:
            self.when_told()
        if self._asked and self.when_asked is not None:
            self.when_asked()
        if not may_move(tensor):
            return Kept(tensor)
        if self._device is None and self._is_wanted(tensor):
            self._watch(tensor.device)
        if tensor.device != self._device:
            return Kept(tensor)
        storage = tensor.untyped_storage()
        size, key = storage.nbytes(), storage_key(storage)
        if size < self._settings.min_tensor_bytes:
            return Kept(tensor)
        with self._lock:
            if self._gone:
                self._settle()
            packed = self._enter(tensor, key, size)
            self._relieve(self._numbers)
            return packed

    def unpack(self, packed: Packed) -> torch.Tensor:
        """The tensor that was packed."""
        self._asked = True
        if isinstance(packed, Kept):
            return packed.tensor()
        saved = packed.saved if isinstance(packed, View) else packed
        tensor = saved.tensor
        self._since += saved.bytes
        if (
            tensor is None
            or saved.leaving
            or self._away
            or self._since >= self._gauge.look_every
            or not self._open
        ):
            with self._lock:
                tensor = self._bring_on(saved)
        if packed.version != saved.current_version():
            check_version(packed.version, saved.current_version(), Geometry.of(tensor))
        if isinstance(packed, View):
            return packed.geometry.in_(tensor.untyped_storage())
        return tensor.detach()  # another owner of the storage, as long as it is used

    def is_quiet(self) -> bool:
        """Whether memory was far from short since this was asked for, and is so now."""
        with self._lock:
            self._asked = False
            if self._device is None or self.counts or self._marks.always:
                return False
            self._settle()
            self._tidy()
            self._look()
            highest, self._highest_lately = self._highest_lately, 0
            moves = self._leaving or self._away or self._ahead
            return not moves and highest <= self._marks.quiet

    @property
    def capacity(self) -> int:
        """Bytes that there may be."""
        return self._marks.capacity

    def room(self) -> int:
        """Bytes that may be allocated before every saved tensor is worth a look."""
        with self._lock:
            self._look()
            return self._marks.awake - self._allocated

    def adopt(self, root: Node) -> None:
        """Take in what the graph behind a node saved without hooks."""
        self._asked = False  # this is no new forward
        for tensor, piece in saved_for(root):
            size = tensor.untyped_storage().nbytes() if may_move(tensor) else 0
            if tensor.device == self._device and size >= self._settings.min_tensor_bytes:
                piece.register_hooks(self.pack, self.unpack)

    def bury(self, remains: Remains) -> None:
        """Put away what a storage left behind, at once or when the lock is free."""
        self._gone.append(remains)
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _is_wanted(self, tensor: torch.Tensor) -> bool:
        if tensor.untyped_storage().nbytes() < self._settings.min_tensor_bytes:
            return False
        wanted = self._settings.device
        if wanted is None:
            return tensor.is_cuda or (tensor.is_cpu and not torch.cuda.is_available())
        return tensor.device.type == wanted.type and wanted.index in (None, tensor.device.index)

    def _watch(self, device: torch.device) -> None:
        wish = self._settings
        self._marks = marks_for(device, wish.threshold, wish.release_at, wish.capacity)
        if self._device is None:
            self._gauge = gauge_for(device, self._marks.capacity)
            self._host = HostStore(device, wish.host_budget)
            self.counts = self._gauge.counts
            self._device = device

    def _enter(self, tensor: torch.Tensor, key: int, size: int) -> Packed:
        """Put a storage at the end of the queue; one that is known was in use until now."""
        reference = self._here.pop(key, None)
        known = reference() if reference is not None else None
        self._numbers += 1
        packed: Packed
        if known is None:
            packed = saved = Saved(tensor.detach(), self._numbers, size, self)
            self._largest = max(self._largest, size)
            self._came(size)
        else:
            saved = known
            saved.number = self._numbers
            packed = Kept(tensor) if has_lazy_bits(tensor) else View(saved, tensor)
        self._here[key] = ref(saved)
        if len(self._here) > self._tidy_at:
            self._tidy()
        return packed

    def _tidy(self) -> None:
        """Forget storages that died."""
        self._here = {k: r for k, r in self._here.items() if r() is not None}
        self._tidy_at = max(_TIDY_AT, 2 * len(self._here))

    def _came(self, size: int) -> None:
        self._gauge.added(size)
        self._allocated += size
        self._since += size

    def _went(self, size: int) -> None:
        self._gauge.removed(size)
        self._allocated -= size

    def _relieve(self, before: int) -> None:
        """Look at the memory in use, if it is time; start to move storages, let go of others.

        Only storages with a number below `before` move.
        """
        always, marks = self._marks.always, self._marks
        excess: float = 0
        if self._since >= self._gauge.look_every:
            self._look()
            expected = self._allocated - self._leaving_bytes
            excess = expected - marks.low if expected > marks.high else 0
        elif not always:
            return
        if self._open and before:
            self._start(float("inf") if always else excess, before)
        self._let_go()

    def _look(self) -> None:
        self._since = 0
        self._allocated = self._gauge.allocated()
        self._highest = max(self._highest, self._allocated)
        self._highest_lately = max(self._highest_lately, self._allocated)

    def _start(self, excess: float, before: float) -> None:
        """Start copies of the longest idle storages until `excess` bytes are on their way."""
        if excess <= 0:
            return
        for key, reference in list(self._here.items()):
            saved = reference()
            if saved is None:
                del self._here[key]
                continue
            tensor = saved.tensor
            assert tensor is not None
            if saved.number >= before or (saved.moved and not self._host.is_over(saved.moved)):
                continue
            saved.moved = None  # of one that stayed, which may have been changed since
            if not is_sole_owner(tensor):
                continue
            if not can_be_rebuilt(tensor):
                del self._here[key]
                continue
            if not self._copy_out(saved):
                return
            del self._here[key]
            saved.leaving = True
            self._leaving.append(reference)
            self._leaving_bytes += saved.bytes
            excess -= saved.bytes
            if excess <= 0:
                return

    def _copy_out(self, saved: Saved) -> bool:
        """Start the copy; False when there is no room for it."""
        # One that would be refused as another was before is no new refusal.
        why = "" if self._host.is_full(saved.bytes) else self._refusal(saved)
        if why is not None and collected():
            self._settle()  # what the garbage had on the host
            if not self._host.is_full(saved.bytes):
                why = self._refusal(saved)
        if why:
            self.refusals += 1
            if not self._warned:
                self._warned = True
                log.warning("memory pressure is not relieved, training goes on: %s", why)
        return why is None

    def _refusal(self, saved: Saved) -> str | None:
        """Start the copy; why there is no room for it, where there is none.

        As text: what is kept of it must not keep the frames of the error.
        """
        assert saved.tensor is not None
        try:
            saved.moved = self._host.move(saved.tensor)
        except HostMemoryError as error:
            return str(error)
        return None

    def _let_go(self, everything: bool = False) -> None:
        """Free device memory in the order its copies were started: what is over, what must."""
        while self._leaving:
            saved = self._leaving[0]()
            if saved is not None and saved.leaving:
                assert saved.moved is not None
                must = everything or self._is_short()
                if not must and not self._host.is_over(saved.moved):
                    return
                self._free(saved, saved.moved)
            self._leaving.popleft()

    def _is_short(self) -> bool:
        """Whether memory on its way out cannot wait for its copy to be over."""
        if self._marks.always:
            return self._leaving_bytes > self._largest
        return self._allocated > self._marks.ceiling(self._largest)

    def _free(self, saved: Saved, moved: Moved) -> None:
        assert saved.tensor is not None
        saved.geometry, saved.final = Geometry.of(saved.tensor), saved.current_version()
        moved.mover.release([moved])
        saved.tensor = None
        saved.leaving = False
        self._leaving_bytes -= saved.bytes
        self._went(saved.bytes)
        self._away.add(saved)
        self._swaps += 1

    def _stay(self, saved: Saved) -> None:
        """Keep a storage on the device that was about to leave."""
        if saved.leaving:
            saved.leaving = False
            self._leaving_bytes -= saved.bytes
            assert saved.tensor is not None
            self._here[storage_key(saved.tensor.untyped_storage())] = ref(saved)

    def _bring_on(self, saved: Saved) -> torch.Tensor:
        """A tensor on the device for the computation that comes; the next ones on their way."""
        if self._gone:
            self._settle()
        self._stay(saved)
        # What was saved later is needed at once, or not any more.
        self._relieve(0 if self._marks.always else saved.number)
        rising, self._last = saved.number > self._last, saved.number
        if saved.tensor is None and saved.number not in self._ahead:
            self._bring(saved)
        self._prefetch(saved.number, rising)
        if saved.tensor is None:
            self._arrive(saved)
        if not self._open:
            self._host.close_if_empty()
        assert saved.tensor is not None
        return saved.tensor

    def _prefetch(self, number: int, rising: bool) -> None:
        """Bring back what is needed next: one storage at least, others if they fit.

        The backward asks for nodes in the reverse order, but for the tensors of one node, which
        may be a whole compiled segment, in the order they were saved.
        """
        if rising:
            self._bring_next(self._away.after(number), number)
        self._bring_next(self._away.before(number), number)

    def _bring_next(self, coming: Iterable[Saved], number: int) -> None:
        """Bring back one storage if none that came before it is nearer, then as many as fit."""
        for saved in coming:
            first, last = sorted((number, saved.number))
            ahead = sum(size for other, size in self._ahead.items() if first < other < last)
            if self._marks.always:
                fits = ahead + saved.bytes <= self._largest
            else:
                fits = self._allocated + saved.bytes <= self._marks.low
            if ahead and not fits:
                return
            try:
                self._bring(saved)
            except torch.OutOfMemoryError:
                return  # it comes when it is asked for

    def _bring(self, saved: Saved) -> None:
        """Start to copy a storage back."""
        assert saved.moved is not None
        try:
            saved.moved.mover.prefetch([saved.moved])
        except torch.OutOfMemoryError:  # everything that can leaves first
            if self._open:
                self._start(float("inf"), min(saved.number, self._last))
            self._let_go(everything=True)
            saved.moved.mover.prefetch([saved.moved])
        self._away.remove(saved.number)
        self._ahead[saved.number] = saved.bytes
        self._came(saved.bytes)
        self._retrievals += 1

    def _arrive(self, saved: Saved) -> None:
        """Hand a storage that was brought back to the computation."""
        assert saved.moved is not None and saved.geometry is not None
        storage = saved.moved.mover.fetch(saved.moved)
        saved.tensor, saved.moved = saved.geometry.in_(storage), None
        del self._ahead[saved.number]
        self._here[storage_key(storage)] = ref(saved)

    def _settle(self) -> None:
        """Put away what storages left behind."""
        while self._gone:
            remains = self._gone.popleft()
            if remains.moved is not None and remains.moved.storage is None:
                self._away.remove(remains.number)
            else:
                self._went(remains.bytes)
            if remains.leaving:
                self._leaving_bytes -= remains.bytes
            self._ahead.pop(remains.number, None)
            remains.moved = None  # dies here, and gives its host memory back
        if not self._open:
            self._host.close_if_empty()
