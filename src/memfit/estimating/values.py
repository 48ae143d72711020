"""The values that fake tensors would have, as far as a model's constructor may need them.

Constructors read numbers from tensors: widths from `arange`, rates from `linspace`. So every small
tensor that is made while a model is built is computed as well, beside its fake. What is random, or
follows from a tensor that is random or large, has no values: reads of it are guessed, and named.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from memfit.errors import ModelError

aten = torch.ops.aten

_LARGEST = 1 << 14  # numbers in a tensor that is computed
_NAMED = 3  # places that a note names
_CPU = torch.device("cpu")
# They give memory as it is; a value comes with what is written there.
_EMPTY = (
    aten.empty,
    aten.empty_like,
    aten.empty_permuted,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
)
_TAKE_SHAPES_ONLY = (
    aten.full_like,
    aten.new_full,
    aten.new_ones,
    aten.new_zeros,
    aten.ones_like,
    aten.zeros_like,
)
_WRITE_ALL = (aten.copy_, aten.fill_, aten.zero_)


class Values(TorchDispatchMode):
    """Answers what code reads from a fake tensor: its value where that is known, else a guess.

    Guessed is that there is nothing unusual: a number is 1, `all` holds, no other condition does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._building = False
        self._guessed: dict[str, None] = {}  # places, in order
        self._memory: WeakIdKeyDictionary = WeakIdKeyDictionary()  # real storages by fake ones
        self._holds: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Compute values inside; afterwards they are known until they are written."""
        self._building = True
        try:
            yield
        finally:
            self._building = False

    def notes(self) -> tuple[str, ...]:
        """Say which reads were guessed while the model was built."""
        places = list(self._guessed)
        if not places:
            return ()
        more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
        return (
            f"the model may be another one: while it was built, {', '.join(places[:_NAMED])}{more} "
            "read from tensors that are random or large; numbers there were taken as 1, conditions "
            "as what is usual",
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return self._read(args[0])
        try:
            result = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            return self._made_by_data(error, func, args, kwargs)
        if isinstance(func, OpOverload):
            self._follow(func, args, kwargs, result)
            if func._overloadpacket is aten.all:
                self._holds[result] = True
        return result

    def _read(self, tensor: torch.Tensor) -> int | float | bool | complex:
        value = self._value(tensor)
        if value is not None:
            with no_dispatch():
                return value.item()
        if self._building:
            self._guessed[_place()] = None
        if tensor.dtype is torch.bool:
            return tensor in self._holds
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _made_by_data(self, error: Exception, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """What an operator gives that fake tensors do not tell: the result itself, or its shape."""
        try:
            real = self._computed(func, args, kwargs)
        except _UnknownError:
            if not self._building:
                raise error from None
            raise ModelError(
                f"the model cannot be estimated: while it is built, {_place()} calls {func}, whose "
                "result depends on what is in a random or large tensor",
                hint="measure it instead: memfit profile TARGET",
            ) from error
        device = next(t.device for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))

        def fake(value: torch.Tensor) -> torch.Tensor:
            made = torch.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device=device
            )
            self._keep(made, value)
            return made

        return tree_map_only(torch.Tensor, fake, real)

    def _follow(self, func: OpOverload, args: Any, kwargs: Any, result: Any) -> None:
        """Compute the values of what an operator made or wrote, or forget them."""
        if torch.Tag.inplace_view in func.tags:
            return  # a tensor has another shape now, its memory is as it was
        written = _written(func, args, kwargs)
        if not self._building:
            self._forget(written)
            return
        given = [t.untyped_storage() for t in _fakes((args, kwargs))]
        made = {i: t for i, t in enumerate(tree_leaves(result)) if _is_new(t, given)}
        if not written and not made:
            return
        try:
            real = self._computed(func, args, kwargs)
        except _UnknownError:
            self._forget(written)
            return
        values = tree_leaves(real)
        for index, tensor in made.items():
            if tensor.shape == values[index].shape:
                self._keep(tensor, values[index])

    def _computed(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """The operator's result on real tensors of the CPU."""
        packet = func._overloadpacket
        if torch.Tag.nondeterministic_seeded in func.tags or packet in _EMPTY:
            raise _UnknownError
        if packet in _WRITE_ALL:
            self._renew(args[0])

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return _CPU
            if not isinstance(leaf, torch.Tensor):
                return leaf
            value = self._value(leaf)
            if value is None and packet in _TAKE_SHAPES_ONLY:
                value = _on_cpu(leaf)
            if value is None:
                raise _UnknownError
            return value

        args, kwargs = tree_map(real, (args, kwargs))
        try:
            with no_dispatch():
                return func(*args, **kwargs)
        except RuntimeError as error:  # not on the CPU
            raise _UnknownError from error

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor with its values, in memory that it shares with its views."""
        if type(tensor) is torch.Tensor and tensor.device == _CPU:
            return tensor
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return None
        if tensor.numel() > _LARGEST or tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage)
        if memory is None or memory.nbytes() != storage.nbytes():
            return None
        return _in(memory, tensor)

    def _keep(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if _is_new(tensor, []):
            storage = tensor.untyped_storage()
            memory = torch.UntypedStorage(storage.nbytes(), device="cpu")
            with no_dispatch():
                _in(memory, tensor).copy_(value)
            self._memory[storage] = memory

    def _renew(self, tensor: torch.Tensor) -> None:
        """Give memory to a tensor that is about to be written over, unless it is a part only."""
        if isinstance(tensor, FakeTensor) and self._value(tensor) is None:
            storage = tensor.untyped_storage()
            size = tensor.numel() * tensor.element_size()
            if tensor.numel() <= _LARGEST and size == storage.nbytes():
                self._memory[storage] = torch.UntypedStorage(size, device="cpu")

    def _forget(self, tensors: list[FakeTensor]) -> None:
        for tensor in tensors:
            self._memory.pop(tensor.untyped_storage(), None)


class _UnknownError(Exception):
    """A tensor's values are needed and not known."""


def _in(memory: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    place = (like.storage_offset(), like.size(), like.stride())
    with no_dispatch():
        return torch.empty(0, dtype=like.dtype, device="cpu").set_(memory, *place)


def _on_cpu(like: torch.Tensor) -> torch.Tensor:
    shape = (like.size(), like.stride())
    with no_dispatch():
        return torch.empty_strided(*shape, dtype=like.dtype, device="cpu")


def _is_new(leaf: Any, given: list[torch.UntypedStorage]) -> bool:
    """Whether it is a small tensor in memory of its own."""
    if not isinstance(leaf, FakeTensor) or leaf.layout is not torch.strided:
        return False
    storage = leaf.untyped_storage()
    return leaf.numel() <= _LARGEST and all(storage is not other for other in given)


def _written(func: OpOverload, args: Any, kwargs: Any) -> list[FakeTensor]:
    schema = func._schema
    if not schema.is_mutable:
        return []
    return [
        tensor
        for index, argument in enumerate(schema.arguments)
        if argument.is_write
        for tensor in _fakes(args[index] if index < len(args) else kwargs.get(argument.name))
    ]


def _fakes(tree: Any) -> list[FakeTensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, FakeTensor) and t.layout is torch.strided]


def _place() -> str:
    """The file and line, outside of torch, that is being run."""
    frame = sys._getframe()
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module != __name__ and module.partition(".")[0] != "torch":
            break
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
