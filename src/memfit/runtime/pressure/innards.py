"""What the valve uses of torch that is private: owners of storages, hooks in force, saved tensors.

Also the functions that forbid hooks, in whose place others stand for a while (aside.py). No other
module of the valve touches it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import Node

from memfit.runtime.swap.hooks import top_hooks

_STORAGE_OWNERS: Any = torch._C._storage_Use_Count  # type: ignore[attr-defined]
_CURRENT_BACKWARD: Any = torch._C._current_graph_task_id
_AUTOGRAD: Any = torch._C._autograd
_RAW, _SAVED = "_raw_saved_", "_saved_"


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that no other living storage has."""
    return int(storage._cdata)


def is_sole_owner(tensor: torch.Tensor) -> bool:
    """Whether letting go of `tensor` frees its memory: no other tensor uses it."""
    return _owners(tensor) == _owners_of_one()


def hooks_in_force() -> object:
    """The hooks for saved tensors that this thread calls, equal while they are the same."""
    return top_hooks()


def hooks_are_allowed() -> bool:
    """Whether hooks for saved tensors may be set now; some transforms of torch forbid them."""
    return bool(_AUTOGRAD._saved_tensors_hooks_is_enabled())


class AllowedHooks:
    """torch's functions that forbid hooks for saved tensors and allow them; others may stand in."""

    _NAMES = ("_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable")

    def __init__(self) -> None:
        self.forbid, self.allow = (getattr(_AUTOGRAD, name) for name in self._NAMES)
        self._ours: tuple[Any, Any] | None = None

    def replace(self, forbid: Any, allow: Any) -> None:
        """Put these in their places, unless someone else has put theirs there."""
        if self._there() == (self.forbid, self.allow):
            self._ours = forbid, allow
            self._put(self._ours)

    def restore(self) -> None:
        """Undo that."""
        if self._ours is not None and self._there() == self._ours:
            self._put((self.forbid, self.allow))
        self._ours = None

    def _there(self) -> tuple[Any, ...]:
        return tuple(getattr(_AUTOGRAD, name) for name in self._NAMES)

    def _put(self, functions: tuple[Any, Any]) -> None:
        for name, function in zip(self._NAMES, functions, strict=True):
            setattr(_AUTOGRAD, name, function)


def is_in_backward() -> bool:
    """Whether this thread runs a backward: hooks that it sets or takes away are put back after."""
    return bool(_CURRENT_BACKWARD() != -1)


def saved_for(root: Node) -> Iterator[tuple[torch.Tensor, Any]]:
    """What the graph behind a node saved without hooks, the longest idle first.

    Each with what takes hooks for it. Left out is what was freed, or changed in place since: that
    is an error of the backward, which hooks would hide.
    """
    for node in sorted(_graph(root), key=lambda node: node._sequence_nr()):  # type: ignore[attr-defined]
        for raw_name, name in _names(type(node)):
            try:
                pieces = _listed(getattr(node, raw_name))
                if any(_has_hooks(piece) for piece in pieces):
                    continue  # to read it would call the hooks of another
                tensors = _listed(getattr(node, name))
            except RuntimeError:
                continue
            for tensor, piece in zip(tensors, pieces, strict=True):
                if tensor is not None:
                    yield tensor, piece


def _graph(root: Node) -> set[Node]:
    found, ahead = {root}, [root]
    while ahead:
        for node, _ in ahead.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                ahead.append(node)
    return found


def _names(kind: Any) -> list[tuple[str, str]]:
    """The attributes of a kind of node with what it saved, raw and as tensors."""
    if issubclass(kind, torch.autograd.function.BackwardCFunction):
        return [("_raw_saved_tensors", "saved_tensors")]
    return _names_in_torch(kind)


@cache
def _names_in_torch(kind: Any) -> list[tuple[str, str]]:
    return [(n, _SAVED + n.removeprefix(_RAW)) for n in dir(kind) if n.startswith(_RAW)]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def _has_hooks(piece: Any) -> bool:
    """Whether a saved tensor has hooks; a version of torch that cannot tell says yes."""
    return getattr(piece, "unpack_hook", piece) is not None


def _owners(tensor: torch.Tensor) -> int:
    return int(_STORAGE_OWNERS(tensor.untyped_storage()._cdata))


@cache
def _owners_of_one() -> int:
    """What torch counts for a storage with one tensor; versions count its Python object or not."""
    tensor = torch.empty(1)
    alone = _owners(tensor)
    other = tensor.detach()
    assert _owners(tensor) == alone + 1, "torch no longer counts the owners of a storage"
    del tensor
    assert _owners(other) == alone
    return alone
