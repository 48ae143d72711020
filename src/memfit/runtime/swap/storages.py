"""Which memory a saved tensor stands for, and whether it may move."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_set_version = torch._C._autograd._unsafe_set_version_counter


class StorageSet:
    """Storages by identity, without keeping them alive.

    A weak reference keeps the address of a dead storage from being used by another one.
    """

    def __init__(self, tensors: Iterable[torch.Tensor | torch.UntypedStorage] = ()) -> None:
        self._references: dict[int, StorageWeakRef] = {}
        self.update(tensors)

    def update(self, tensors: Iterable[torch.Tensor | torch.UntypedStorage]) -> None:
        """Add the storages of these tensors; the dead ones go."""
        dead = [key for key, reference in self._references.items() if reference.expired()]
        for key in dead:
            del self._references[key]
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor | torch.UntypedStorage) -> None:
        """Add one; a tensor without a storage of its own (sparse, a subclass) adds nothing."""
        if isinstance(tensor, torch.Tensor):
            if not has_storage(tensor):
                return
            tensor = tensor.untyped_storage()
        if tensor not in self:
            self._references[tensor._cdata] = StorageWeakRef(tensor)

    def __bool__(self) -> bool:
        return bool(self._references)

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._references


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a plain one over one piece of memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


def may_move(tensor: torch.Tensor, device: torch.device, smallest: int, static: StorageSet) -> bool:
    """Whether the memory behind a saved tensor can be taken away and brought back.

    Not that of parameters and buffers, of which views are saved as well as themselves; not what
    lies elsewhere, is small, or is seen through a lazy conjugate or sign. Most stay because they
    are small or static: that is asked first.
    """
    if not has_storage(tensor):
        return False
    storage = tensor.untyped_storage()
    if storage.nbytes() < max(1, smallest) or storage in static:
        return False
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device == device and not lazy and not tensor.is_inference()


def same_counter(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether changing one tensor in place counts for the other, as it does for views.

    Tensors can share memory and yet count apart (`unsafe_chunk`): then equal versions say nothing.
    """
    version, other = a._version, b._version
    _set_version((a,), (version + 1,))
    try:
        return b._version != other
    finally:
        _set_version((a,), (version,))
