"""What a head returns while its loss is made in tiles: its input, in the place of logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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


class HeadOutput(torch.Tensor):
    """The input of a head, (..., width), where its logits are expected.

    Changes of dtype leave it as it is, and factors go into it when the head has no bias, as they
    commute with the head. Any other operator would mean something else than on logits: refused.
    """

    has_bias = False

    @classmethod
    def of(cls, hidden: torch.Tensor, has_bias: bool) -> HeadOutput:
        """Stand for the logits of `hidden`."""
        output = hidden.as_subclass(cls)
        output.has_bias = has_bias
        return output

    def hidden(self) -> torch.Tensor:
        """The head's input."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        first = args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            if name in _FACTS:
                return func(*args, **(kwargs or {}))
            if isinstance(first, cls) and name in _AS_IT_IS:
                return first
            if isinstance(first, cls) and name in _SCALING and _is_factor(first, args[1:]):
                return cls.of(func(first.hidden(), *args[1:]), first.has_bias)
        raise UsageError(
            f"the model changes its logits by {name!r} before the loss, so they cannot be made in "
            "tiles",
            hint="let the model return its hidden state and give it to memfit.tiled_cross_entropy, "
            "or leave tiled_loss out",
        )


def _is_factor(output: HeadOutput, others: tuple[Any, ...]) -> bool:
    return not output.has_bias and len(others) == 1 and isinstance(others[0], int | float)
