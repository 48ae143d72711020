"""What a head returns while its loss is made in tiles: its input, in the place of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from memfit.errors import UsageError

_AS_IT_IS = {"float", "to", "contiguous", "type", "bfloat16", "half"}
_SCALING = {"mul", "multiply", "div", "true_divide", "divide", "__mul__", "__rmul__", "__truediv__"}
_FACTS = {
    "__format__",
    "__get__",
    "__hash__",
    "__len__",
    "__repr__",
    "data_ptr",
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "nelement",
    "numel",
    "register_hook",
    "retain_grad",
    "size",
    "storage_offset",
    "stride",
    "untyped_storage",
}


class StandIns(TorchFunctionMode):
    """Stand-ins for the logits of one call of a model, (..., width) in place of (..., vocabulary).

    From the head to the loss it watches what is done with them. Changes of dtype leave them as they
    are, and factors go into them when the head has no bias, as they commute with the head. Any
    other operator would mean something else than on logits, so it is refused.
    """

    def __init__(self, *, scalable: bool) -> None:
        super().__init__()
        self._scalable = scalable
        self._made: list[torch.Tensor] = []
        self._waiting = 0

    def __contains__(self, value: object) -> bool:
        return any(value is made for made in self._made)

    def make(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a tensor that stands for the logits of `hidden`, and watch it."""
        stand_in = hidden.view_as(hidden)
        self._made.append(stand_in)
        self._waiting += 1
        if self._waiting == 1:
            self.__enter__()
        return stand_in

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Look away while the loss is made of one; watch on if others have not come to a loss."""
        waiting, self._waiting = self._waiting, 0
        if waiting:
            self.__exit__(None, None, None)
        yield
        if waiting > 1:
            self.__enter__()
            self._waiting = waiting - 1

    def close(self) -> None:
        """Stop watching those that never came to a loss."""
        if self._waiting:
            self.__exit__(None, None, None)
        self._waiting = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in _FACTS or not any(leaf in self for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if name in _AS_IT_IS and args[0] in self:
            return args[0]
        if name in _SCALING and args[0] in self and self._is_factor(args[1:]):
            scaled = func(*args, **kwargs)
            self._made.append(scaled)
            return scaled
        raise UsageError(
            f"the model changes its logits by {name!r} before the loss, so they cannot be made in "
            "tiles",
            hint="let the model return its hidden state and give it to memfit.tiled_cross_entropy, "
            "or leave tiled_loss out",
        )

    def _is_factor(self, others: tuple[Any, ...]) -> bool:
        return self._scalable and len(others) == 1 and isinstance(others[0], int | float)
