"""Frozen weights lie on the device in int8 and are made whole when they are used.

For phases that only run forward those that are trained can, too, such as an evaluation between
epochs; the exact weights are back, bit for bit, when the block is left:

    with Int8Weights(model, forward_only=True), torch.no_grad():
        evaluate(model)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.runtime.calls import Forward, Wrap, replaced_forward
from memfit.runtime.lowbit.int8_modules import channel_axis, find_modules
from memfit.runtime.lowbit.int8_tensor import Int8Tensor, quantize
from memfit.runtime.optimizer.footprint import Footprint
from memfit.runtime.reversible import Stacked
from memfit.runtime.swap.moved import Geometry
from memfit.workload import refuse_compiled, unwrap

log = logging.getLogger(__name__)


class Int8Weights(Stacked):
    """Keeps the frozen weights of Linear, Embedding and Conv modules in int8.

    Approximate: a weight is used within half a scale of itself. The exact weights lie in host
    memory meanwhile, as the same parameters, so that state_dict() gives them and undo() puts them
    back; new values loaded into them are taken over at the next call. On the CPU nothing is saved.
    Autograd keeps no float weight for backward, where it is made again; other saved-tensor hooks
    do not see what these modules save.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        symmetric: bool = True,
        per_channel: bool = True,
        names: Iterable[str] | None = None,
        forward_only: bool = False,
    ) -> None:
        """`forward_only` takes trained weights too, and refuses forwards that record gradients."""
        refuse_compiled(model)
        self.modules = find_modules(unwrap(model), names, forward_only)
        self._symmetric, self._per_channel = symmetric, per_channel
        self._weights: dict[int, _Weight] = {}  # by id of the parameter: modules may share one

    def _make(self, stack: ExitStack) -> None:
        """Quantise the weights and let them go from the device."""
        stack.callback(self._weights.clear)
        for name, module in self.modules.items():
            parameter: Any = module.weight
            if id(parameter) not in self._weights:
                quantized = partial(
                    quantize,
                    symmetric=self._symmetric,
                    axis=channel_axis(module),
                    per_channel=self._per_channel,
                )
                weight = _Weight(name, parameter, quantized)
                stack.callback(weight.put_back)
                self._weights[id(parameter)] = weight
        for module in dict.fromkeys(self.modules.values()):
            wrap = _wrap(module, self._weights[id(module.weight)])
            stack.enter_context(replaced_forward(module, wrap))
            # With hooks, torch's encoder layer calls its modules, and else may read past them.
            stack.callback(module.register_forward_pre_hook(_nothing).remove)

    def quantized(self) -> dict[str, Int8Tensor]:
        """The weights in int8, by the names of their modules, while they are."""
        assert self.at_work, "the weights are not in int8"
        return {name: self._weights[id(m.weight)].int8 for name, m in self.modules.items()}

    def footprint(self) -> Footprint:
        """Bytes that leave the device, and of the largest weight while it is used; once at work."""
        assert self.at_work, "the weights are not in int8"
        weights = self._weights.values()
        moved = [w for w in weights if w.device.type != "cpu"]
        removed = sum(w.parameter.nbytes - w.int8.nbytes for w in moved)
        host = sum(w.parameter.nbytes if w in moved else w.int8.nbytes for w in weights)
        return Footprint(removed, max(w.working_bytes for w in weights), host)


class _Weight:
    """A parameter whose values lie in host memory, and in int8 where they came from."""

    def __init__(
        self,
        name: str,
        parameter: torch.nn.Parameter,
        quantize: Callable[[torch.Tensor], Int8Tensor],
    ) -> None:
        self.parameter = parameter
        self.device = parameter.device
        self._name, self._quantize = name, quantize
        self._int8 = self._quantized()
        parameter.data = parameter.data.cpu()
        self._version = parameter._version

    @property
    def int8(self) -> Int8Tensor:
        """The parameter as it is now."""
        if self.parameter._version != self._version:
            self._int8 = self._quantized()
            self._version = self.parameter._version
        return self._int8

    @property
    def working_bytes(self) -> int:
        """Bytes while the weight is made whole."""
        in_float = self.parameter.numel() * self.int8.scale.element_size()
        return in_float + (self.parameter.nbytes if in_float != self.parameter.nbytes else 0)

    def put_back(self) -> None:
        """Give the parameter its values where it was."""
        self.parameter.data = self.parameter.data.to(self.device)

    def _quantized(self) -> Int8Tensor:
        values = self.parameter.data.to(self.device)
        try:
            found = self._quantize(values)
        except UsageError as error:
            raise UsageError(f"{self._name}: {error.message}", hint=error.hint) from error
        if found.num_zero_channels:
            log.warning(
                "%s: %d of %d channels of the weight are all zero, and stay so in int8",
                self._name,
                found.num_zero_channels,
                found.codes.shape[found.axis],
            )
        return found


def _wrap(module: torch.nn.Module, weight: _Weight) -> Wrap:
    """What runs in the place of the module's forward."""
    looks_up = type(module).forward is torch.nn.Embedding.forward

    def wrap(forward: Forward) -> Forward:
        def call(*args: Any, **kwargs: Any) -> Any:
            if weight.parameter.requires_grad and torch.is_grad_enabled():
                raise UsageError(
                    f"a {type(module).__name__} that is trained ran forward with its weight in "
                    "int8, where it has no gradient",
                    hint="run it under torch.no_grad(), or undo() first",
                )
            if module._parameters["weight"] is not weight.parameter:
                raise UsageError(
                    f"the weight of a {type(module).__name__} was replaced while it was in int8",
                    hint="undo() first, or copy the new values into the parameter",
                )
            if looks_up and len(args) == 1 and not kwargs:
                return weight.int8.rows(args[0])
            return _call_with(module, weight, forward, args, kwargs)

        return call

    return wrap


def _call_with(
    module: torch.nn.Module, weight: _Weight, forward: Forward, args: Any, kwargs: Any
) -> Any:
    """Run the module's own forward with the weight made whole for the time of the call."""
    int8, dtype = weight.int8, _used_dtype(weight)
    whole: Any = int8.dequantize(dtype)
    storage = whole.untyped_storage().data_ptr()

    def keep(tensor: torch.Tensor) -> torch.Tensor | Geometry:
        ours = tensor.untyped_storage().data_ptr() == storage
        return Geometry.of(tensor) if ours else tensor

    def make_again(kept: torch.Tensor | Geometry) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        return kept.in_(int8.dequantize(dtype).untyped_storage())

    module._parameters["weight"] = whole
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, make_again):
            return forward(*args, **kwargs)
    finally:
        module._parameters["weight"] = weight.parameter


def _used_dtype(weight: _Weight) -> torch.dtype:
    """The type in which autocast would use the weight: a cast copy would be kept for backward."""
    kind, dtype = weight.device.type, weight.parameter.dtype
    casts = torch.is_autocast_enabled(kind) and dtype is torch.float32
    return torch.get_autocast_dtype(kind) if casts else dtype


def _nothing(*_: object) -> None:
    """A hook that does nothing."""
