"""The state of one group of parameters, packed into one piece of host memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from memfit.errors import HostMemoryError
from memfit.runtime.optimizer.accepted import Parameters
from memfit.runtime.optimizer.footprint import movable, rounded, tensor_bytes
from memfit.runtime.optimizer.on_host.memory import dense_strides, host_tensor, storage_bytes
from memfit.runtime.swap.arena import Arena, Slot
from memfit.runtime.swap.lanes import Copy, Lanes
from memfit.runtime.swap.moved import Geometry

State = dict[Any, dict[str, Any]]  # of an optimizer, by parameter


class _Entry(NamedTuple):
    """One state tensor of one parameter, and how it lies in the block."""

    position: int
    key: str
    geometry: Geometry


class HostBlock:
    """Moves a group's state between the host, where it lives, and the device, where it steps.

    One copy takes all of it in one direction. The state's tensors on the host have storages of
    their own, so that saving one does not save the others.
    """

    def __init__(self, parameters: Parameters, arena: Arena, lanes: Lanes) -> None:
        self.parameters = parameters
        self._arena, self._lanes = arena, lanes
        self._entries: list[_Entry] = []
        self._on_host: list[torch.Tensor] = []
        self._on_device: list[torch.Tensor] = []
        self._slot: Slot | None = None
        self._storage: torch.UntypedStorage | None = None
        self._copy: Copy | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the block."""
        return 0 if self._slot is None else self._slot.view.numel()

    def adopt(self, state: State) -> None:
        """Take the state as it is, wherever it lies; the host waits."""
        found = [
            (i, key, tensor)
            for i, p in enumerate(self.parameters)
            if p in state
            for key, tensor in movable(state[p])
        ]
        self._lanes.synchronize()
        old = self._slot
        self._lay_out(found)
        for (_, _, tensor), host in zip(found, self._on_host, strict=True):
            if tensor is not host:
                host.copy_(tensor)
        self._point(state, self._on_host)
        if old is not None and old is not self._slot:
            self._arena.give(old, None)
        self._forget_device()

    def fetch(self) -> None:
        """Start to bring the state to the device, unless it is on its way."""
        if self._slot is not None and self._storage is None:
            storage = torch.UntypedStorage(self.size_bytes, device=self._lanes.device)
            self._copy = self._lanes.copy_in(self._slot, storage_bytes(storage))
            self._storage = storage

    def enter(self, state: State) -> None:
        """Make the state on the device the optimizer's."""
        self.fetch()
        if self._storage is not None:
            self._wait()
            self._on_device = [e.geometry.in_(self._storage) for e in self._entries]
            self._point(state, self._on_device)

    def leave(self, state: State) -> None:
        """Start to take the state back to the host, which is the optimizer's again."""
        if not self._is_as_laid_out(state):
            self.adopt(state)
            return
        assert self._slot is not None and self._storage is not None
        self._copy = self._lanes.copy_out(storage_bytes(self._storage), self._slot)
        self._point(state, self._on_host)
        self._on_device = []

    def release(self) -> None:
        """Let the device's memory go, after the copies that use it."""
        self._wait()
        self._forget_device()

    def give_back(self, state: State) -> None:
        """Put the state on the device for good, each tensor by itself."""
        self.release()
        self._lanes.synchronize()
        back = [torch.empty_like(t, device=self._lanes.device).copy_(t) for t in self._on_host]
        self._point(state, back)
        self._entries, self._on_host, self._slot = [], [], None

    def _lay_out(self, found: list[tuple[int, str, torch.Tensor]]) -> None:
        entries, end = [], 0
        for position, key, tensor in found:
            offset = end // tensor.element_size()
            geometry = Geometry(tensor.dtype, offset, tuple(tensor.shape), dense_strides(tensor))
            entries.append(_Entry(position, key, geometry))
            end += rounded(tensor_bytes(tensor))
        if entries == self._entries:
            return
        self._slot = None if not entries else _take(self._arena, end)
        self._entries = entries
        self._on_host = (
            [] if self._slot is None else [host_tensor(self._slot, e.geometry) for e in entries]
        )

    def _is_as_laid_out(self, state: State) -> bool:
        """Whether the state consists of the tensors that came from the host, and of no others."""
        tensors = [t for p in self.parameters if p in state for _, t in movable(state[p])]
        return len(tensors) == len(self._on_device) > 0 and all(
            a is b for a, b in zip(tensors, self._on_device, strict=True)
        )

    def _point(self, state: State, tensors: list[torch.Tensor]) -> None:
        for entry, tensor in zip(self._entries, tensors, strict=True):
            state[self.parameters[entry.position]][entry.key] = tensor

    def _wait(self) -> None:
        if self._copy is not None:
            copy, self._copy = self._copy, None
            self._lanes.wait(copy)

    def _forget_device(self) -> None:
        self._on_device, self._storage, self._copy = [], None, None


def _take(arena: Arena, size: int) -> Slot:
    try:
        return arena.take(size)
    except HostMemoryError:
        arena.grow(size)
        return arena.take(size)
