"""A parameter's twin in host memory, which the optimizer steps on the CPU."""

from __future__ import annotations

import torch

from memfit.runtime.optimizer.footprint import tensor_bytes
from memfit.runtime.optimizer.on_host.memory import (
    dense,
    dense_strides,
    host_tensor,
    tensor_as_bytes,
)
from memfit.runtime.swap.arena import Arena
from memfit.runtime.swap.lanes import Copy, Lanes
from memfit.runtime.swap.moved import Geometry


class HostTwin:
    """The master copy of a parameter, and room for its gradient.

    It follows changes that others make to the parameter, as far as autograd counts them: not those
    made through `.data`.
    """

    def __init__(self, parameter: torch.nn.Parameter, arena: Arena, lanes: Lanes) -> None:
        self.parameter = parameter
        self._lanes = lanes
        self._value = arena.take(tensor_bytes(parameter))
        self._gradient = arena.take(tensor_bytes(parameter))
        self._version: int | None = None  # of the parameter, when the twin was last like it
        value = host_tensor(self._value, _geometry(parameter))
        self.host = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)

    def gather(self) -> tuple[torch.Tensor, Copy]:
        """Start to copy the gradient to the host; what must live until the copy is over."""
        assert self.parameter.grad is not None
        if self._version != self.parameter._version:
            self._lanes.copy_out(tensor_as_bytes(self.parameter.detach()), self._value)
            self._version = self.parameter._version
        gradient = dense(self.parameter.grad)
        self.host.grad = host_tensor(self._gradient, _geometry(gradient))
        return gradient, self._lanes.copy_out(tensor_as_bytes(gradient), self._gradient)

    def scatter(self) -> Copy | None:
        """Start to copy the new value to the device, unless it was changed there meanwhile."""
        self.host.grad = None
        if self._version != self.parameter._version:
            self._version = None
            return None
        copy = self._lanes.copy_in(self._value, tensor_as_bytes(self.parameter.detach()))
        torch.autograd.graph.increment_version(self.parameter)
        self._version = self.parameter._version
        return copy


def _geometry(tensor: torch.Tensor) -> Geometry:
    return Geometry(tensor.dtype, 0, tuple(tensor.shape), dense_strides(tensor))
