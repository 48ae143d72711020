"""Images with their channels last: the layout in which compiled convolutions work.

Compiled code turns every convolution's input around. Where segments are compiled one by one, each
would do so for its own input, and turn its output back for the code outside: a copy of every
tensor between segments, in both directions. A model that is given its images that way hands the
layout on from layer to layer, and nothing is copied but the images.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from memfit.measure.step import is_out_of_memory
from memfit.workload import Workload, unwrap

_DIMENSIONS = 4


def prefers_channels_last(workload: Workload) -> bool:
    """Whether most of the model's weights that are applied to tensors are plain convolutions, and
    its code can work on images in that layout: some asks for views that there are none of then."""
    if not has_mostly_convolutions(workload.model):
        return False
    try:
        with channels_last(workload.model, True), torch.no_grad():
            workload.compute_loss()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return False
    return True


def has_mostly_convolutions(model: nn.Module) -> bool:
    """Whether the model has more plain convolutions than linear layers."""
    modules = list(model.modules())
    plain = [m for m in modules if isinstance(m, nn.Conv2d) and m.groups == 1]
    return len(plain) > sum(isinstance(m, nn.Linear) for m in modules)


@contextmanager
def channels_last(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Turn the images that the model is given around until the block is left, if `wanted`."""
    if not wanted:
        yield
        return
    hook = unwrap(model).register_forward_pre_hook(_turn_around, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        hook.remove()


def _turn_around(model: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map(_turned, (args, kwargs))


def _turned(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim == _DIMENSIONS and value.is_floating_point():
        return value.contiguous(memory_format=torch.channels_last)
    return value
