"""What is trained: a model, its loss, its optimizer and an example batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.errors import ModelError, UsageError

LossFn = Callable[[torch.nn.Module, Any], torch.Tensor]


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside wrappers such as DistributedDataParallel or torch.compile's."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__module__.startswith("torch.nn.parallel"):
            inner = getattr(model, "module", None)
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def refuse_compiled(model: torch.nn.Module) -> None:
    """UsageError when torch.compile stands around a module: a plan inside it would be compiled."""
    for name, module in model.named_modules():
        compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        own = module.__dict__.get("forward")
        if compiled or hasattr(own, "_torchdynamo_orig_callable"):
            raise UsageError(
                f"{name or 'the model'} was given to torch.compile, where no plan can be at work",
                hint="give the model as it was before: memfit compiles its segments by itself "
                '(executor="inductor")',
            )


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether step() cannot be called without arguments, as that of LBFGS."""
    try:  # of the class: a scheduler puts a function of its own in the place of the method
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        return True
    except ValueError:  # it has no signature: the call itself will tell
        pass
    return False


@dataclass
class Workload:
    """A training step to fit: `loss_fn(model, batch)` gives a scalar loss that `optimizer` lowers.

    `scaler` is the GradScaler of an fp16 step, if it has one.
    """

    model: torch.nn.Module
    loss_fn: LossFn
    optimizer: torch.optim.Optimizer
    batch: Any
    name: str | None = field(default=None, kw_only=True)
    scaler: torch.amp.GradScaler | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.model, torch.nn.Module):
            raise UsageError(
                f"the model is a {type(self.model).__name__}, not a torch.nn.Module",
                hint="pass Workload(model, loss_fn, optimizer, batch) in this order",
            )
        if not callable(self.loss_fn):
            raise UsageError(
                f"loss_fn is a {type(self.loss_fn).__name__}, not a function",
                hint="write loss_fn(model, batch) so that it returns a scalar loss",
            )
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"the optimizer is a {type(self.optimizer).__name__}, not a torch.optim.Optimizer",
                hint="for example torch.optim.AdamW(model.parameters(), lr=1e-4)",
            )
        if _needs_closure(self.optimizer):
            raise UsageError(
                f"{type(self.optimizer).__name__} runs forward and backward itself, as often as it "
                "likes, through the closure that its step() needs: there is no one step to fit",
                hint="use an optimizer whose step() needs nothing, for example torch.optim.AdamW; "
                "memfit.pressure works with any loop",
            )
        if not any(p.requires_grad for p in self.model.parameters()):
            raise ModelError(
                "the model has no trainable parameters, so there is no training step to fit",
                hint="set requires_grad=True on the parameters to train",
            )
        self._check_devices()

    @property
    def device(self) -> torch.device:
        """The device of the first trainable parameter: where the step runs."""
        return next(p for p in self.model.parameters() if p.requires_grad).device

    def batch_tensors(self, batch: Any = None) -> list[torch.Tensor]:
        """The tensors of `batch` (default: the example batch), in pytree order."""
        leaves = tree_leaves(self.batch if batch is None else batch)
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def compute_loss(self, batch: Any = None) -> torch.Tensor:
        """Run forward and return the loss, checked to be one differentiable number."""
        loss = self.loss_fn(self.model, self.batch if batch is None else batch)
        if not isinstance(loss, torch.Tensor):
            raise ModelError(
                f"loss_fn returned a {type(loss).__name__}, not a tensor",
                hint="return the loss itself, for example model(**batch).loss",
            )
        if loss.numel() != 1:
            raise ModelError(
                f"loss_fn returned a tensor of shape {tuple(loss.shape)}, not a scalar",
                hint="reduce it, for example with .mean()",
            )
        if not loss.requires_grad and torch.is_grad_enabled():
            raise ModelError(
                "the loss does not depend on any trainable parameter",
                hint="check for .detach() or torch.no_grad() in loss_fn",
            )
        return loss

    def _check_devices(self) -> None:
        devices = {p.device for p in self.model.parameters() if p.requires_grad}
        if len(devices) > 1:
            raise ModelError(
                f"the trainable parameters lie on several devices: {sorted(map(str, devices))}",
                hint="memfit fits a step on one device: move the model with model.to(device)",
            )
        for tensor in self.batch_tensors():
            if tensor.device != self.device:
                raise UsageError(
                    f"the batch has a tensor on {tensor.device}, the model is on {self.device}",
                    hint=f"move the batch with tensor.to({str(self.device)!r})",
                )
